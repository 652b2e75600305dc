"""The weight functions against their definition, at their edges, and their bounds."""

import math
import re

import pytest
import torch

from miles_sc import ScoreCenteringInputs, score_centering_loss
from miles_sc.loss.score_centering.importance_sampling import importance_sampling
from tests.loss.oracle import weight_function
from tests.loss.test_estimator import INF, LOOSE, MODES, NAN, TIGHT, close, plain, run, saying


@pytest.mark.parametrize("mode", MODES)
def test_strategies_agree_with_the_definition(mode):
    f, strategy = weight_function(mode, **TIGHT), importance_sampling(mode, **TIGHT)
    ratio = torch.linspace(0.0531, 3.017, 60, dtype=torch.float64)  # no value on an edge: the next test has those
    q = torch.full_like(ratio, 0.3)
    close(strategy.sampled(ratio.log()), f(ratio))
    close(strategy.head(ratio * q, q, ratio.log()), q * f(ratio))
    close(strategy.tail(ratio), ratio * f(1 / ratio))


def test_mis_band_includes_its_edges():
    """Edges at powers of two, where every route to the ratio is exact."""
    bounds = {**LOOSE, "mis_low": 0.5, "mis_high": 2.0}
    strategy = importance_sampling("mis", **bounds)
    p, q = torch.tensor([[0.25, 0.5], [0.5, 0.25]], dtype=torch.float64)
    close(strategy.sampled(p.log() - q.log()), p / q)
    close(strategy.head(p, q, p.log() - q.log()), p)
    close(strategy.tail(torch.tensor([0.5, 2.0], dtype=torch.float64)), torch.ones(2, dtype=torch.float64))
    beyond = torch.tensor([0.5 * (1 - 1e-9), 2 * (1 + 1e-9)], dtype=torch.float64)
    for values in (strategy.sampled(beyond.log()), strategy.head(beyond * q, q, beyond.log()), strategy.tail(beyond)):
        assert (values == 0).all()


def test_mis_edges_reach_the_loss():
    half, quarter = math.log(0.5), math.log(0.25)
    inputs = ScoreCenteringInputs(
        train_log_probs=torch.tensor([quarter, half], dtype=torch.float64),
        train_head_log_probs=torch.tensor([[quarter], [half]], dtype=torch.float64),
        rollout_log_probs=torch.tensor([half, quarter], dtype=torch.float64),
        rollout_head_log_probs=torch.tensor([[half], [quarter]], dtype=torch.float64),
        head_mask=torch.ones(2, 1, dtype=torch.bool),
        advantages=torch.ones(2, dtype=torch.float64),
    )
    _, metrics = score_centering_loss(inputs, importance_sampling="mis", mis_low=0.5, mis_high=2.0)
    close(metrics["sc_importance_weight"], torch.tensor([0.5, 2.0], dtype=torch.float64))
    assert (metrics["sc_weight_clipped_fraction"] == 0).all()
    # rho is 2/3 and 3/2, inside the band: nothing is clipped, so nothing is left to correct.
    close(metrics["sc_coefficient_l1"], torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
def test_extreme_ratios_do_not_overflow(mode):
    """exp(700) is finite in float64 and not in float32; the closed forms never need it."""
    strategy = importance_sampling(mode, **LOOSE)
    log_ratio = torch.tensor([-700.0, -90.0, 90.0, 700.0])
    p, q = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    head = {"none": q, "tis": torch.zeros(4), "mis": torch.zeros(4)}[mode]
    close(strategy.head(p, q, log_ratio), head, atol=0, rtol=0)
    tail = {"none": [1e-6, 1e6], "tis": [2e-6, 1.0], "mis": [0.0, 0.0]}[mode]
    close(strategy.tail(torch.tensor([1e-6, 1e6])), torch.tensor(tail), atol=0, rtol=1e-6)
    assert strategy.sampled(log_ratio).isfinite().all()


@pytest.mark.parametrize(
    "mode, bounds, named",
    [
        ("tis", {"tis_clip": 0.0}, "tis_clip"),
        ("tis", {"tis_clip": -1.5}, "tis_clip"),
        ("tis", {"tis_clip": NAN}, "tis_clip"),
        ("tis", {"tis_clip": INF}, "tis_clip"),
        ("mis", {"mis_low": -0.25}, "mis_low"),
        ("mis", {"mis_low": NAN}, "mis_low"),
        ("mis", {"mis_high": NAN}, "mis_high"),
        ("mis", {"mis_high": INF}, "mis_high"),
        ("mis", {"mis_low": 3.5, "mis_high": 2.5}, "mis_low"),
    ],
)
def test_bad_bounds_are_named(mode, bounds, named):
    message = saying(named, re.escape(str(bounds[named])))
    with pytest.raises(ValueError, match=message):
        importance_sampling(mode, **{**LOOSE, **bounds})
    with pytest.raises(ValueError, match=message):
        run(plain(inside=True), mode, **bounds)


@pytest.mark.parametrize("mode", ["TIS", "clip", None])
def test_unknown_mode_is_named(mode):
    with pytest.raises(ValueError, match=str(mode)):
        importance_sampling(mode, **LOOSE)
    with pytest.raises(ValueError, match=saying("importance_sampling", str(mode))):
        run(plain(inside=True), mode)
