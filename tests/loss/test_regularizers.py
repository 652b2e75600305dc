"""Reference KL beside a loss."""

import dataclasses

import pytest
import torch

from miles_sc.loss.batch import LossSettings
from miles_sc.loss.regularizers import KL_TYPES, reference_kl
from miles_sc.loss.scoring import full_vocabulary_log_probs, score
from tests.loss.oracle import (
    dense_support_log_probs,
)
from tests.loss.test_losses import INF, NAN, REPLAY, centering, close, log_probs_of, problem, run, share


def written_out_kl(difference, kind):
    return {
        "k1": difference,
        "k2": difference**2 / 2,
        "k3": torch.exp(-difference) - 1 + difference,
        "low_var_kl": (torch.exp(-difference) - 1 + difference).clamp(-10, 10),
    }[kind]


@pytest.mark.parametrize("kind", KL_TYPES)
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("name", ["policy_loss", "score_centering"])
def test_reference_kl_compares_full_vocabulary_scores(kind, unbiased, complete, name):
    logits, batch, _ = problem(complete=complete)
    batch.ref_log_probs[0] -= 5  # far enough for the clamp of low_var_kl, on both sides
    batch.ref_log_probs[1] = log_probs_of(logits, batch.token_ids)[1] + 5
    config = centering(**(REPLAY if complete else {}))
    options = {"use_kl_loss": True, "kl_loss_type": kind, "use_unbiased_kl": unbiased, "score_centering": config}
    plain = run(name, logits, batch, LossSettings(score_centering=config))
    trained = run(name, logits, batch, LossSettings(kl_loss_coef=0.2, **options))
    leaf = logits.clone().requires_grad_()
    log_p = torch.log_softmax(leaf, dim=1).gather(1, batch.token_ids[:, None])[:, 0]
    kl = written_out_kl(log_p - batch.ref_log_probs, kind)
    if unbiased:
        ids = batch.selected_ids
        sampled_from = dense_support_log_probs(leaf, ids)[:, 0] if complete else log_p
        kl = kl * (sampled_from - batch.rollout_log_probs).exp()
    penalty = 0.2 * (kl * share(batch)).sum()
    close(trained[0], plain[0] + penalty.detach())
    close(trained[1], plain[1] + torch.autograd.grad(penalty, leaf)[0])
    close(trained[2]["kl_loss"][batch.active], kl.detach()[batch.active])
    assert not trained[2]["kl_invalid_fraction"].any()
    close(trained[2]["pg_loss"], plain[2]["pg_loss"])


@pytest.mark.parametrize("kind", KL_TYPES)
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_models_have_a_kl_of_exactly_zero(kind, unbiased, complete, dtype):
    logits, batch, _ = problem(complete=complete)
    logits = logits.to(dtype)
    config = centering(**(REPLAY if complete else {}))
    settings = LossSettings(
        score_centering=config, use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type=kind, use_unbiased_kl=unbiased
    )
    batch = dataclasses.replace(batch, ref_log_probs=full_vocabulary_log_probs(logits, batch, settings))
    _, _, metrics = run("score_centering", logits, batch, settings)
    assert metrics["kl_loss"].abs().max() == 0 and not metrics["kl_invalid_fraction"].any()
    if complete:  # over the support the same logits give another log-prob, which must not enter
        assert (score(logits, batch, settings, with_head=True).sampled - batch.ref_log_probs).abs().max() > 0.1


@pytest.mark.parametrize("kind", KL_TYPES)
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize(
    ("shift", "invalid"), [(39.9, 0), (-39.9, 0), (40.1, 1), (-40.1, 1), (INF, 1), (-INF, 1), (NAN, 1), (1e30, 1)]
)
def test_a_difference_beyond_forty_counts_as_broken_and_not_as_far(kind, unbiased, shift, invalid):
    log_p = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0 - shift, -2.5], dtype=torch.float64)
    ratio = (log_p - torch.tensor([-1.1, -1.9])) if unbiased else None
    active = torch.ones(2, dtype=torch.bool)
    kl, broken = reference_kl(log_p, ref, kind=kind, active=active, train_rollout_log_ratio=ratio)
    assert broken.tolist() == [invalid, 0]
    (gradient,) = torch.autograd.grad(kl.sum(), log_p)
    assert kl.isfinite().all() and gradient.isfinite().all()
    assert (kl[0] == 0) == bool(invalid) and kl[1] != 0


@pytest.mark.parametrize("ratio", [40.1, -40.1, NAN, INF])
def test_the_unbiased_form_watches_its_ratio_too(ratio):
    log_p = torch.tensor([-1.0], requires_grad=True)
    given = torch.tensor([ratio]) + 0 * log_p
    kl, broken = reference_kl(log_p, torch.tensor([-2.0]), kind="k1", active=torch.tensor([True]), train_rollout_log_ratio=given)
    assert (kl.item(), broken.item()) == (0, 1)


@pytest.mark.parametrize("value", [NAN, INF, 99.0])
def test_a_masked_token_is_neither_far_nor_broken(value):
    kl, broken = reference_kl(torch.tensor([-1.0]), torch.tensor([value]), kind="k3", active=torch.tensor([False]))
    assert (kl.item(), broken.item()) == (0, 0)


def test_an_extreme_reference_leaves_loss_and_gradient_finite():
    logits, batch, _ = problem()
    ref = batch.ref_log_probs.clone()
    ref[:3] = torch.tensor([-INF, -1e4, NAN])
    settings = LossSettings(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", use_unbiased_kl=True)
    loss, gradient, metrics = run("policy_loss", logits, dataclasses.replace(batch, ref_log_probs=ref), settings)
    assert loss.isfinite() and gradient.isfinite().all()
    assert metrics["kl_invalid_fraction"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_an_unknown_kl_is_named():
    with pytest.raises(ValueError, match="--kl-loss-type k4: choose one of k1, k2, k3, low_var_kl"):
        reference_kl(torch.zeros(1), torch.zeros(1), kind="k4", active=torch.tensor([True]))
