"""Through the pipeline: conversion, shards, micro-batches, and one table of logits as the model."""

import numpy as np
import pytest
import torch

from miles_sc.data.conversion import samples_to_train_data
from miles_sc.data.micro_batch import build_micro_batch
from miles_sc.data.sharding import shard
from miles_sc.loss.batch import LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.hub import loss_function
from tests.loss.test_losses import REPLAY, centering, close, randn
from tests.samples import VOCAB, answer, sample_with, support_answer


def rollout(mode, lengths=(3, 1, 0, 4, 2, 3, 2, 1)):
    samples = []
    for i, rows in enumerate(lengths):
        sample = sample_with(
            (support_answer if mode == "support" else answer)(rows, seed=i), mode=mode, index=i, group_index=i // 4
        )
        sample.reward = [1.0, 0.0, 0.3, -0.5][i % 4]
        if i in (0, 3):
            sample.append_observation([5, 6])
        samples.append(sample)
    return samples


def steps_of(samples, mode, name, *, per_token=True, world_size=1, batch=8, raw=False, options=(), **split):
    """Per optimizer step the loss, the gradient of the [V, V] table and the number of passes, summed over all ranks."""
    config = centering(importance_sampling="tis", **(REPLAY if mode == "support" else {}))
    data = samples_to_train_data(samples, config, vocab_size=VOCAB, normalize_std=False, normalize_rewards=not raw)
    table = (1.2 * randn(VOCAB, VOCAB, seed=9)).requires_grad_()
    scored = torch.log_softmax(table.detach(), dim=1)
    for key, shift in (("old_log_probs", 0.02), ("ref_log_probs", -0.1)):
        data[key] = [
            (scored[ids[-n - 1 : -1], ids[ids.size - n :]] + shift).float().numpy() if n else np.empty(0, np.float32)
            for ids, n in zip(data["tokens"], data["response_lengths"], strict=True)
        ]
    settings = LossSettings(score_centering=config, **dict(options))
    shards = shard(data, world_size=world_size, global_batch_size=batch, per_token=per_token, **split)
    results = []
    for step in range(len(shards[0].steps)):
        total, guard = torch.zeros((), dtype=torch.float64), FiniteGuard()
        for part in shards:
            for members in part.steps[step]:
                micro = build_micro_batch(part.data, members, torch.device("cpu"), pad_token_id=0)
                logits = table[micro.input_ids].flatten(0, 1)[micro.rows]
                total = total + loss_function(name)(micro.loss, logits, settings, guard).loss
        guard.raise_if_tripped()
        results.append((total.detach(), torch.autograd.grad(total, table)[0]))
    return results


REGULARIZED = {
    "entropy_coef": 0.1,
    "use_kl_loss": True,
    "kl_loss_coef": 0.2,
    "kl_loss_type": "k2",
    "use_unbiased_kl": True,
}
SPLITS = [
    {"micro_batch_size": 3},
    {"micro_batch_size": 8},
    {"max_tokens": 15},
    {"world_size": 2},
    {"world_size": 2, "max_tokens": 9},
    {"world_size": 4, "micro_batch_size": 2},
    {"world_size": 8},
]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("mode", ["selected", "support"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("score_centering", {}), ("score_centering", REGULARIZED), ("policy_loss", REGULARIZED | {"use_tis": True})],
)
def test_no_split_into_ranks_and_micro_batches_changes_loss_or_gradient(split, per_token, mode, name, options):
    (whole,) = steps_of(rollout(mode), mode, name, per_token=per_token, options=options)
    (divided,) = steps_of(rollout(mode), mode, name, per_token=per_token, options=options, **split)
    assert whole[1].abs().max() > 1e-3
    close(divided[0], whole[0], 1e-7)
    close(divided[1], whole[1], 1e-7)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_reduction_is_the_mean_that_it_says(per_token):
    samples = rollout("selected")
    (got,) = steps_of(samples, "selected", "score_centering", per_token=per_token)
    # one sample a call: its loss is then the mean of its own tokens, whichever way it is reduced
    alone, counts = [], []
    advantages = samples_to_train_data(samples, centering(), normalize_std=False)["rewards"]
    for sample, advantage in zip(samples, advantages, strict=True):
        sample.reward = advantage
        ((loss, gradient),) = steps_of([sample], "selected", "score_centering", batch=1, raw=True)
        alone.append((loss, gradient))
        counts.append(sum(sample.loss_mask))
    shares = [n / sum(counts) for n in counts] if per_token else [(n > 0) / sum(n > 0 for n in counts) for n in counts]
    close(got[0], sum(share * loss for share, (loss, _) in zip(shares, alone, strict=True)), 1e-7)
    close(got[1], sum(share * gradient for share, (_, gradient) in zip(shares, alone, strict=True)), 1e-7)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", ["score_centering", "policy_loss"])
def test_masked_samples_and_tokens_leave_the_denominator(per_token, name):
    """A batch with half of its samples masked is the other half."""
    samples = rollout("selected")[:4]
    masked = [sample_with(answer(5, seed=40 + i), index=10 + i) for i in range(4)]
    for sample in masked:
        sample.loss_mask, sample.reward = [0] * 5, 1.0
    options = {"per_token": per_token, "options": REGULARIZED, "raw": True}
    (half,) = steps_of(samples, "selected", name, batch=4, **options)
    (doubled,) = steps_of(samples + masked, "selected", name, batch=8, **options)
    close(doubled[0], half[0], 1e-7)
    close(doubled[1], half[1], 1e-7)


def test_optimizer_steps_are_each_their_own_mean():
    samples = rollout("selected")
    both = steps_of(samples, "selected", "score_centering", batch=4)
    apart = [steps_of(part, "selected", "score_centering", batch=4)[0] for part in (samples[:4], samples[4:])]
    assert len(both) == 2
    for (loss, gradient), (expected, expected_gradient) in zip(both, apart, strict=True):
        close(loss, expected, 1e-7)
        close(gradient, expected_gradient, 1e-7)


# --- the hub
