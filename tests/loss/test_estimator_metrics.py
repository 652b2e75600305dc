"""What the estimator says of each token."""

import math

import pytest
import torch

from miles_sc import ScoreCenteringInputs, score_centering_loss
from tests.loss.oracle import DenseBatch
from tests.loss.test_estimator import (
    METRICS,
    MODES,
    TIGHT,
    advantages_like,
    close,
    log_softmax,
    padded,
    plain,
    run,
)


@pytest.mark.parametrize("mode", MODES)
def test_metrics_are_named_detached_and_per_token(mode):
    _, metrics, _ = run(padded(), mode)
    assert set(metrics) == METRICS
    for name, values in metrics.items():
        assert values.shape == (6,) and not values.requires_grad and values.isfinite().all(), name
        assert values.dtype == torch.float64, name


def test_clipped_fraction_marks_the_tokens_whose_weight_is_not_their_ratio():
    """Ratios 0.7, 1.1 and 1.25 against a clip of 1.2 and a band of [0.8, 1.3]."""
    p, q = torch.tensor([0.35, 0.55, 0.5], dtype=torch.float64), torch.tensor([0.5, 0.5, 0.4], dtype=torch.float64)
    rows = torch.stack([p, 1 - p], dim=1).log()
    batch = DenseBatch(rows, torch.stack([q, 1 - q], dim=1).log(), torch.tensor([[0, 0]] * 3), advantages_like(3))
    clipped = {mode: run(batch, mode, **TIGHT)[1]["sc_weight_clipped_fraction"].tolist() for mode in MODES}
    assert clipped == {"none": [0, 0, 0], "tis": [0, 0, 1], "mis": [1, 0, 0]}


def drift_metrics(train, rollout, **changes):
    """The two drift metrics for given sampled log-probs, beside an empty head."""
    train, rollout = (torch.tensor(x, dtype=torch.float64) for x in (train, rollout))
    head = torch.zeros(len(train), 1, dtype=torch.float64)
    inputs = ScoreCenteringInputs(train, head, rollout, head, head.bool(), torch.ones_like(train), **changes)
    _, metrics = score_centering_loss(inputs)
    return metrics["train_rollout_logprob_abs_diff"], metrics["train_rollout_kl"]


def test_drift_is_k3_of_rollout_from_train():
    train, rollout = [-1.0, -0.5, -2.0], [-0.5, -1.0, -2.0]
    difference, kl = drift_metrics(train, rollout)
    close(difference, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    close(kl, torch.tensor([math.expm1(-0.5) + 0.5, math.expm1(0.5) - 0.5, 0.0], dtype=torch.float64))


def test_drift_is_clamped():
    """At 10, from an overflowing ratio too; a ratio of exp(-9) is still told in full."""
    _, kl = drift_metrics([-0.1, -900.1, -9.1, -18.1], [-900.1, -0.1, -0.1, -0.1])
    close(kl, torch.tensor([10.0, 10.0, math.expm1(-9.0) + 9.0, 10.0], dtype=torch.float64))


def test_drift_ignores_untrained_tokens_only():
    difference, kl = drift_metrics([-1.0, -1.0], [-0.5, -0.5], active=torch.tensor([True, False]))
    close(difference, torch.tensor([0.5, 0.0], dtype=torch.float64))
    close(kl, torch.tensor([math.expm1(-0.5) + 0.5, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("mode", ["tis", "mis"])
def test_zero_advantage_keeps_the_true_metrics(mode):
    """A token that teaches nothing still measures the drift: a weight of 0.8 stays 0.8."""
    batch = plain(inside=True)
    idle = batch.with_(advantages=torch.zeros_like(batch.advantages))
    weight = torch.tensor(0.8, dtype=torch.float64)
    log_p = log_softmax(batch.train_logits)
    rollout = batch.rollout_log_probs.scatter(1, batch.token_ids[:, :1], log_p.gather(1, batch.token_ids[:, :1]) - weight.log())
    _, expected, _ = run(batch.with_(rollout_log_probs=rollout), mode)
    loss, metrics, gradient = run(idle.with_(rollout_log_probs=rollout), mode)
    assert (loss == 0).all() and (gradient == 0).all()
    close(metrics["sc_importance_weight"], weight.expand(6))
    for name in METRICS:
        close(metrics[name], expected[name], atol=0, rtol=0)
