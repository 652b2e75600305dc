"""The losses as the hub gives them out: values and gradients against written-out formulas, alone and in a pipeline."""

import dataclasses
import math

import pytest
import torch

from miles_sc import ScoreCenteringConfig
from miles_sc.loss.batch import LossBatch, LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.hub import loss_function, register_loss
from miles_sc.loss.scoring import score
from tests.loss.oracle import (
    DenseBatch,
    dense_entropy,
    dense_log_softmax,
    dense_support_entropy,
    dense_support_log_probs,
    reference,
    weight_function,
)
from tests.samples import VOCAB, K

MODES = ["none", "tis", "mis"]
BOUNDS = {"tis_clip": 1.2, "mis_low": 0.8, "mis_high": 1.3}
NAN, INF = math.nan, math.inf
ROWS = 8


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, check_dtype=False)


def randn(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def problem(*, complete=False, seed=0, temperature=1.0):
    """Logits [T, V], a batch whose rows differ in sign, head, activity and place of the token, the sampler [T, V]."""
    logits = 1.5 * randn(ROWS, VOCAB, seed=seed)
    tempered = logits / temperature
    order = (tempered + 0.8 * randn(ROWS, VOCAB, seed=seed + 1)).argsort(dim=1, descending=True)
    candidate_ids = order[:, :K].clone()
    candidate_ids[3, 2:] = candidate_ids[5, 1:] = -1
    head = candidate_ids >= 0
    rollout = tempered + 0.5 * randn(ROWS, VOCAB, seed=seed + 2)
    if complete:
        kept = torch.stack([torch.isin(torch.arange(VOCAB), ids) for ids in candidate_ids])
        rollout = rollout.where(kept, -INF)
        token_ids = torch.tensor([row[row >= 0][i % (row >= 0).sum()] for i, row in enumerate(candidate_ids)])
    else:
        token_ids = order[torch.arange(ROWS), torch.arange(ROWS) % (K + 2)]
    rollout = dense_log_softmax(rollout)
    batch = LossBatch(
        selected_ids=torch.cat([token_ids[:, None], candidate_ids], dim=1),
        weights=torch.linspace(0.05, 0.2, ROWS, dtype=torch.float64),
        active=torch.tensor([1, 1, 1, 1, 0, 1, 1, 1]).bool(),
        advantages=torch.tensor([1.5, -0.7, 0.4, 2.0, 1.0, -1.2, 0.0, 0.9], dtype=torch.float64),
        rollout_log_probs=rollout.gather(1, token_ids[:, None])[:, 0],
        candidate_log_probs=torch.where(head, rollout.gather(1, candidate_ids.clamp(min=0)), -INF),
        old_log_probs=log_probs_of(tempered, token_ids)
        + torch.tensor([-0.3, -0.2, 0.2, 0.01, 0.1, 0.25, 0.3, -0.02], dtype=torch.float64),
        ref_log_probs=log_probs_of(tempered + 0.4 * randn(ROWS, VOCAB, seed=seed + 4), token_ids),
    )
    return logits, batch, rollout


def log_probs_of(logits, token_ids):
    return dense_log_softmax(logits).gather(1, token_ids[:, None])[:, 0]


def centering(**options):
    return ScoreCenteringConfig(**{"top_logprobs_num": K, **BOUNDS, **options})


REPLAY = {"top_k": K, "top_p": 0.9}


def run(name, logits, batch, settings, guard=None):
    """(loss, gradient [T, V], token metrics); raises what the guard has seen."""
    logits, guard = logits.clone().requires_grad_(), guard or FiniteGuard()
    output = loss_function(name)(batch, logits, settings, guard)
    guard.raise_if_tripped()
    (gradient,) = torch.autograd.grad(output.loss, logits)
    assert not any(values.requires_grad for values in output.token_metrics.values())
    assert {values.shape for values in output.token_metrics.values()} == {batch.active.shape}
    return output.loss.detach(), gradient, output.token_metrics


def share(batch):
    """What a row's loss counts: its weight, 0 where it is masked."""
    return torch.where(batch.active, batch.weights, 0.0)


# --- the policy loss


def written_out_policy_loss(logits, batch, settings, mean_weight=lambda ratio: 1.0):
    """Loss and gradient of PPO, token by token, with the derivative by hand."""
    loss, gradient = 0.0, torch.zeros_like(logits)
    for t in range(ROWS):
        token, advantage, share_t = batch.token_ids[t], batch.advantages[t].item(), share(batch)[t].item()
        p = torch.softmax(logits[t], dim=0)
        ratio = (p[token].log() - batch.old_log_probs[t]).exp().item()
        low, high = 1 - settings.eps_clip, 1 + settings.eps_clip_high
        clipped = min(max(ratio, low), high)
        weight = mean_weight((batch.old_log_probs[t] - batch.rollout_log_probs[t]).exp().item())
        loss -= share_t * weight * min(ratio * advantage, clipped * advantage)
        if ratio * advantage <= clipped * advantage:
            score_of_token = -p
            score_of_token[token] += 1
            gradient[t] = -share_t * weight * advantage * ratio * score_of_token
    return loss, gradient


PPO = [{}, {"eps_clip": 0.05, "eps_clip_high": 0.05}, {"eps_clip": 0.02, "eps_clip_high": 0.3}]
WEIGHTS = [
    ({"use_tis": False}, lambda ratio: 1.0),
    ({"use_tis": True, "tis_clip": 1.1}, lambda ratio: min(ratio, 1.1)),
    ({"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9}, lambda ratio: max(0.9, min(ratio, 1.1))),
    (
        {"use_tis": True, "tis_mode": "mask", "tis_clip": 1.2, "tis_clip_low": 0.8},
        lambda ratio: ratio if 0.8 <= ratio <= 1.2 else 0.0,
    ),
]


@pytest.mark.parametrize("clip", PPO)
@pytest.mark.parametrize(("options", "weight"), WEIGHTS)
def test_policy_loss_is_what_it_says(clip, options, weight):
    logits, batch, _ = problem()
    settings = LossSettings(**clip, **options)
    loss, gradient, metrics = run("policy_loss", logits, batch, settings)
    expected_loss, expected_gradient = written_out_policy_loss(logits, batch, settings, weight)
    assert loss.item() == pytest.approx(expected_loss, abs=1e-12)
    close(gradient, expected_gradient)
    ratio = (log_probs_of(logits, batch.token_ids) - batch.old_log_probs).exp()
    trained = batch.active & (batch.advantages != 0)
    clipped = torch.where(batch.advantages > 0, ratio > 1 + settings.eps_clip_high, ratio < 1 - settings.eps_clip)
    assert metrics["pg_clipfrac"].bool().tolist() == (clipped & trained).tolist()
    close(metrics["ppo_kl"][trained], -ratio.log()[trained])
    close((metrics["loss"] * share(batch)).sum(), loss)


def test_the_cases_clip_both_ways_and_truncate_both_ways():
    """Guards the problem: every branch of the formulas above is taken."""
    logits, batch, _ = problem()
    ratio = (log_probs_of(logits, batch.token_ids) - batch.old_log_probs).exp()[batch.active]
    sign = batch.advantages[batch.active]
    assert ((ratio > 1.05) & (sign > 0)).any() and ((ratio < 0.95) & (sign < 0)).any() and ((ratio - 1).abs() < 0.05).any()
    mismatch = (batch.old_log_probs - batch.rollout_log_probs).exp()[batch.active]
    assert (mismatch > 1.2).any() and (mismatch < 0.8).any() and ((mismatch > 0.9) & (mismatch < 1.1)).any()


def test_truncation_metrics():
    logits, batch, _ = problem()
    _, _, metrics = run("policy_loss", logits, batch, LossSettings(use_tis=True, tis_clip=1.1))
    mismatch = (batch.old_log_probs - batch.rollout_log_probs).exp()
    close(metrics["tis"][batch.active], mismatch[batch.active])
    assert metrics["tis_clipfrac"][batch.active].bool().tolist() == (mismatch > 1.1)[batch.active].tolist()


def test_drift_metrics():
    logits, batch, _ = problem()
    _, _, metrics = run("policy_loss", logits, batch, LossSettings())
    difference = log_probs_of(logits, batch.token_ids) - batch.rollout_log_probs
    close(metrics["train_rollout_logprob_abs_diff"][batch.active], difference.abs()[batch.active])
    close(metrics["train_rollout_kl"][batch.active], (difference.exp() - 1 - difference)[batch.active])


def test_on_policy_the_gradient_is_reinforce():
    logits, batch, _ = problem()
    batch = dataclasses.replace(batch, old_log_probs=log_probs_of(logits, batch.token_ids))
    _, gradient, _ = run("policy_loss", logits, batch, LossSettings())
    one_hot = torch.nn.functional.one_hot(batch.token_ids, VOCAB)
    close(gradient, -(share(batch) * batch.advantages)[:, None] * (one_hot - torch.softmax(logits, dim=1)))


@pytest.mark.parametrize("row", [4, 6])
@pytest.mark.parametrize("field", ["old_log_probs", "rollout_log_probs", "ref_log_probs"])
@pytest.mark.parametrize("value", [NAN, -INF, INF])
def test_a_masked_token_or_one_without_advantage_may_hold_anything(row, field, value):
    logits, batch, _ = problem()
    settings = LossSettings(use_tis=True)
    clean = run("policy_loss", logits, batch, settings)
    broken = getattr(batch, field).clone()
    broken[row] = value
    spoiled = run("policy_loss", logits, dataclasses.replace(batch, **{field: broken}), settings)
    assert torch.equal(clean[0], spoiled[0]) and torch.equal(clean[1], spoiled[1])


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("policy_loss", "advantages"),
        ("policy_loss", "old_log_probs"),
        ("policy_loss", "rollout_log_probs"),
        ("score_centering", "advantages"),
        ("score_centering", "rollout_log_probs"),
    ],
)
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_trained_token_may_not(name, field, value):
    logits, batch, _ = problem()
    broken = getattr(batch, field).clone()
    broken[3] = value
    with pytest.raises(ValueError, match=f"NaN or infinity in {field} at row 3 of micro-batch 0"):
        run(
            name,
            logits,
            dataclasses.replace(batch, **{field: broken}),
            LossSettings(score_centering=centering(), use_tis=True),
        )


@pytest.mark.parametrize("name", ["policy_loss", "score_centering"])
def test_a_model_that_broke_is_named(name):
    logits, batch, _ = problem()
    logits[1] = NAN
    with pytest.raises(ValueError, match="in train_log_probs at row 1 of micro-batch 0"):
        run(name, logits, batch, LossSettings(score_centering=centering()))


# --- score centering


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("complete", [False, True])
def test_score_centering_equals_the_dense_oracle(mode, temperature, complete):
    logits, batch, rollout = problem(complete=complete, temperature=temperature)
    config = centering(importance_sampling=mode, temperature=temperature, **(REPLAY if complete else {}))
    loss, gradient, metrics = run("score_centering", logits, batch, LossSettings(score_centering=config))
    ids = batch.selected_ids
    dense = DenseBatch(logits / temperature, rollout, ids, batch.advantages, batch.active, complete)
    expected = reference(dense, weight_function(mode, **BOUNDS))
    close(loss, (expected.loss * batch.weights).sum())
    close(gradient, expected.gradient * batch.weights[:, None] / temperature)
    close(metrics["pg_loss"], expected.loss)
    close(metrics["sc_correction"][batch.active], expected.correction[batch.active])
    close(metrics["sc_train_head_mass"], expected.train_head_mass)
    in_head = (batch.candidate_ids == batch.token_ids[:, None]).any(dim=1)
    assert metrics["sc_sampled_in_head"].tolist() == in_head.double().tolist()
    assert complete or 0 < in_head.sum() < ROWS


@pytest.mark.parametrize("mode", MODES)
def test_off_the_support_the_gradient_is_exactly_zero(mode):
    logits, batch, _ = problem(complete=True)
    _, gradient, _ = run(
        "score_centering", logits, batch, LossSettings(score_centering=centering(importance_sampling=mode, **REPLAY))
    )
    off = torch.stack([~torch.isin(torch.arange(VOCAB), ids) for ids in batch.candidate_ids])
    assert gradient[off].abs().max() == 0 and gradient[~off].abs().max() > 0


@pytest.mark.parametrize("mode", MODES)
def test_rounding_of_a_recorded_support_is_no_tail(mode):
    """A mass of 1 - 8e-5 passes validation; read as a tail it would be 80 times the trainer's floor."""
    logits, batch, _ = problem(complete=True)
    settings = LossSettings(score_centering=centering(importance_sampling=mode, **REPLAY))
    whole, _, _ = run("score_centering", logits, batch, settings)
    short = dataclasses.replace(batch, candidate_log_probs=batch.candidate_log_probs - 8e-5)
    loss, _, metrics = run("score_centering", logits, short, settings)
    assert metrics["sc_tail_ratio"].tolist() == [1] * ROWS and not metrics["sc_tail_floor_fraction"].any()
    close(loss, whole, 1e-3)


def test_shifted_rows_show_in_the_alignment_alarm():
    logits, batch, _ = problem(complete=True)
    ids = torch.cat([batch.token_ids.roll(1)[:, None], batch.candidate_ids], dim=1)
    shifted = dataclasses.replace(batch, selected_ids=ids)
    settings = LossSettings(score_centering=centering())
    in_head = [run("score_centering", logits, b, settings)[2]["sc_sampled_in_head"].mean() for b in (batch, shifted)]
    assert in_head[0] == 1 and in_head[1] < 0.7


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("complete", [False, True])
def test_identical_weights_have_no_drift_at_the_samplers_temperature(temperature, complete):
    logits, batch, _ = problem(complete=complete)
    ids = batch.selected_ids
    whole = dense_log_softmax(logits, temperature=temperature).gather(1, ids.clamp(min=0))
    same = dense_support_log_probs(logits, ids, temperature=temperature) if complete else whole
    head = torch.where(batch.candidate_ids >= 0, same[:, 1:], -INF)
    batch = dataclasses.replace(batch, rollout_log_probs=same[:, 0], candidate_log_probs=head)
    config = centering(importance_sampling="tis", temperature=temperature, **(REPLAY if complete else {}))
    for name in ("score_centering", "policy_loss"):
        _, _, metrics = run(name, logits, batch, LossSettings(score_centering=config))
        assert metrics["train_rollout_logprob_abs_diff"].max() < 1e-12
    _, _, metrics = run("score_centering", logits, batch, LossSettings(score_centering=config))
    close(metrics["sc_importance_weight"], torch.ones(ROWS))
    close(metrics["sc_correction"], torch.zeros(ROWS))


# --- observing beside another loss

BESIDE = [
    {},
    {"use_tis": True},
    {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "use_unbiased_kl": True},
    {"observe_entropy": True, "log_probs_chunk_size": 2},
]


def in_float32(batch):
    """As batches come from the pipeline."""
    return LossBatch(**{name: x.float() if x.is_floating_point() else x for name, x in vars(batch).items() if x is not None})


@pytest.mark.parametrize("options", BESIDE)
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_observing_changes_neither_value_nor_gradient_to_the_bit(options, complete, dtype):
    logits, batch, _ = problem(complete=complete)
    settings = LossSettings(score_centering=centering(**(REPLAY if complete else {})), **options)
    batch = in_float32(batch)
    plain = run("policy_loss", logits.to(dtype), batch, settings)
    observed = run("policy_loss", logits.to(dtype), batch, dataclasses.replace(settings, observe=True))
    assert torch.equal(plain[0], observed[0]) and torch.equal(plain[1], observed[1])
    for name, values in plain[2].items():
        assert torch.equal(values, observed[2][name]), name
    centered = run("score_centering", logits.to(dtype), batch, settings)[2]
    added = observed[2].keys() - plain[2].keys()
    assert added == {name for name in centered if name.startswith("sc_")}
    assert all(torch.equal(observed[2][name], centered[name]) for name in added)


def test_observing_never_trips_the_guard():
    logits, batch, _ = problem()
    broken = batch.candidate_log_probs.clone()
    broken[0, 0] = NAN
    run(
        "policy_loss",
        logits,
        dataclasses.replace(batch, candidate_log_probs=broken),
        LossSettings(score_centering=centering(), observe=True),
    )


# --- entropy


@pytest.mark.parametrize("name", ["policy_loss", "score_centering"])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_is_subtracted_with_its_coefficient(name, complete, temperature):
    logits, batch, _ = problem(complete=complete)
    config = centering(temperature=temperature, **(REPLAY if complete else {}))
    plain = run(name, logits, batch, LossSettings(score_centering=config))
    trained = run(name, logits, batch, LossSettings(score_centering=config, entropy_coef=0.3))
    leaf = logits.clone().requires_grad_()
    ids = batch.selected_ids
    entropy = (
        dense_support_entropy(leaf, ids, temperature=temperature) if complete else dense_entropy(leaf, temperature=temperature)
    )
    bonus = 0.3 * (entropy * share(batch)).sum()
    close(trained[0], plain[0] - bonus.detach())
    close(trained[1], plain[1] - torch.autograd.grad(bonus, leaf)[0])
    close(trained[2]["entropy_loss"], entropy.detach())
    close(trained[2]["pg_loss"], plain[2]["pg_loss"])


@pytest.mark.parametrize("name", ["policy_loss", "score_centering"])
def test_observed_entropy_is_logged_and_not_trained(name):
    logits, batch, _ = problem()
    plain = run(name, logits, batch, LossSettings(score_centering=centering()))
    observed = run(name, logits, batch, LossSettings(score_centering=centering(), observe_entropy=True))
    assert "entropy_loss" not in plain[2]
    assert torch.equal(plain[0], observed[0]) and torch.equal(plain[1], observed[1])
    close(observed[2]["entropy_loss"], dense_entropy(logits))


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(("options", "has_graph"), [({"observe_entropy": True}, False), ({"entropy_coef": 0.1}, True)])
def test_observed_entropy_keeps_no_graph(complete, options, has_graph):
    logits, batch, _ = problem(complete=complete)
    settings = LossSettings(score_centering=centering(**(REPLAY if complete else {})), **options)
    assert score(logits.requires_grad_(), batch, settings, with_head=False).entropy.requires_grad is has_graph


def test_a_custom_loss_is_found_by_its_name():
    try:
        register_loss("tests_own", lambda *_: "result")
        assert loss_function("tests_own")() == "result"
        with pytest.raises(ValueError, match="'tests_own' is registered already, by tests.loss.test_losses: choose another"):
            register_loss("tests_own", lambda *_: None)
    finally:
        from miles_sc.loss import hub

        hub._LOSSES.pop("tests_own")


def test_an_unknown_loss_lists_those_there_are():
    with pytest.raises(ValueError, match="--loss-type grpo: choose one of policy_loss, score_centering"):
        loss_function("grpo")
