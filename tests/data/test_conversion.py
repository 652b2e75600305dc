"""Samples to train data: the keys, the advantages and what a producer may not do."""

import math

import numpy as np
import pytest
import torch

from miles_sc import ScoreCenteringConfig
from miles_sc.data.conversion import group_relative_rewards, samples_to_train_data
from miles_sc.rollout.sample import Sample
from miles_sc.sampling_support import SamplingSupport
from tests.samples import PROMPT, VOCAB, K, answer, sample_with, state, support_answer

CONFIGS = {
    "selected": ScoreCenteringConfig(top_logprobs_num=K),
    "support": ScoreCenteringConfig(top_logprobs_num=K, top_p=0.9, top_k=K),
}
ANSWERS = {"selected": answer, "support": support_answer}
NAN, INF = float("nan"), float("inf")


def rollout(mode="selected", rewards=(1.0, 0.0, 0.5, 0.5)):
    """Two prompts, two responses each; the first holds an observation."""
    samples = []
    for i, reward in enumerate(rewards):
        sample = sample_with(ANSWERS[mode](i + 1, seed=i), mode=mode, index=20 + i, group_index=i // 2)
        sample.reward, sample.truncated = reward, i == 2
        samples.append(sample)
    samples[0].append_observation([7])
    return samples


def convert(samples, mode="selected", **options):
    return samples_to_train_data(samples, CONFIGS[mode], vocab_size=VOCAB, **options)


def test_every_key_has_an_entry_a_sample():
    samples = rollout()
    data = convert(samples, normalize_std=False)
    assert set(data) == {
        "tokens",
        "response_lengths",
        "loss_masks",
        "raw_reward",
        "rewards",
        "truncated",
        "sample_indices",
        "rollout_log_probs",
        "rollout_topk_token_ids",
        "rollout_topk_log_probs",
    }
    assert data["response_lengths"] == [2, 2, 3, 4]
    assert [mask.tolist() for mask in data["loss_masks"]] == [[1, 0], [1, 1], [1] * 3, [1] * 4]
    assert data["raw_reward"] == [1.0, 0.0, 0.5, 0.5] and data["rewards"] == [0.5, -0.5, 0.0, 0.0]
    assert data["truncated"] == [0, 0, 1, 0] and data["sample_indices"] == [20, 21, 22, 23]
    for i, sample in enumerate(samples):
        assert data["tokens"][i].dtype == np.int32 and data["tokens"][i].tolist() == sample.tokens
        assert data["rollout_log_probs"][i].tolist() == pytest.approx(sample.rollout_log_probs)
        assert (data["loss_masks"][i].dtype, data["rollout_log_probs"][i].dtype) == (np.uint8, np.float32)
        # the arrays themselves, without a copy
        assert data["rollout_topk_token_ids"][i] is sample.rollout_topk_token_ids
        assert data["rollout_topk_log_probs"][i] is sample.rollout_topk_log_probs


def test_without_recording_there_are_no_candidate_keys():
    data = samples_to_train_data(rollout(), ScoreCenteringConfig(), vocab_size=VOCAB)
    assert not [name for name in data if "topk" in name or "sampling_mask" in name]


def test_the_samples_are_left_as_they_were():
    samples = rollout("support")
    before = [state(sample) for sample in samples]
    convert(samples, "support")
    assert [state(sample) for sample in samples] == before


# --- the compact support form


def test_a_support_in_the_candidates_order_replaces_their_ids():
    samples = rollout("support")
    data = convert(samples, "support")
    assert data["rollout_topk_token_ids"] == [None] * 4
    assert [lengths.tolist() for lengths in data["rollout_topk_lengths"]] == [[1, 0], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert data["rollout_topk_lengths"][0].dtype == np.int32
    for i, sample in enumerate(samples):
        assert data["rollout_sampling_mask_ids"][i] is sample.rollout_sampling_mask.ids
        assert data["rollout_sampling_mask_offsets"][i] is sample.rollout_sampling_mask.offsets


def test_another_order_keeps_the_ids_of_that_sample_alone():
    samples = rollout("support")
    for name in ("rollout_topk_token_ids", "rollout_topk_log_probs"):
        array = getattr(samples[3], name).copy()
        array[3, :2] = array[3, 1::-1]
        setattr(samples[3], name, array)
    data = convert(samples, "support")
    assert [ids is None for ids in data["rollout_topk_token_ids"]] == [True, True, True, False]
    assert [lengths is None for lengths in data["rollout_topk_lengths"]] == [False, False, False, True]
    assert data["rollout_topk_token_ids"][3] is samples[3].rollout_topk_token_ids


def test_the_candidates_must_be_the_whole_support():
    samples = rollout("support")
    support = samples[2].rollout_sampling_mask.padded(K)
    rows = [[token for token in row if token >= 0] for row in support.tolist()]
    rows[2][0] = next(i for i in range(VOCAB) if i not in rows[2])
    samples[2].rollout_sampling_mask = SamplingSupport.from_rows(rows)
    with pytest.raises(ValueError, match="sample 22, row 2: the candidates are not the recorded sampling support"):
        convert(samples, "support")
    samples[2].rollout_sampling_mask = SamplingSupport.from_rows([*rows[:2], list(range(K + 2))])
    with pytest.raises(ValueError, match="sample 22, row 2: the candidates are not the recorded sampling support"):
        convert(samples, "support")


# --- advantages


def scored(rewards, groups):
    samples = [Sample(index=i, group_index=group) for i, group in enumerate(groups)]
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
    return samples


@pytest.mark.parametrize("groups", [[0, 0, 0, 1, 1], [1, 0, 1, 0, 1], [5, 5, 5, 5, 5]])
@pytest.mark.parametrize("normalize_std", [False, True])
def test_advantages_are_the_groups_own(groups, normalize_std):
    rewards = [1.0, 0.0, 0.25, 3.0, -2.0]
    got = group_relative_rewards(scored(rewards, groups), normalize_rewards=True, normalize_std=normalize_std)
    expected = torch.zeros(5, dtype=torch.float64)
    for group in set(groups):
        rows = torch.tensor(groups) == group
        values = torch.tensor(rewards, dtype=torch.float64)[rows]
        expected[rows] = (values - values.mean()) / (values.std() + 1e-6 if normalize_std else 1.0)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("normalize_std", [False, True])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1000 / 3])
def test_equal_rewards_give_an_advantage_of_exactly_zero(reward, normalize_std):
    """Exactly 0 says "not trained"; rounding of a mean must not say otherwise, least of all over a tiny spread."""
    samples = scored([reward] * 7, [0] * 7)
    assert not group_relative_rewards(samples, normalize_rewards=True, normalize_std=normalize_std).any()


def test_a_group_of_one_has_no_advantage():
    got = group_relative_rewards(scored([3.0, 1.0, 0.0], [0, 1, 1]), normalize_rewards=True, normalize_std=True)
    assert got[0] == 0 and got[1] == pytest.approx(0.5 / (0.5**0.5 + 1e-6))


@pytest.mark.parametrize("normalize_std", [False, True])
def test_raw_rewards_stay_as_they_are(normalize_std):
    got = group_relative_rewards(scored([3.0, -1.0], [0, 0]), normalize_rewards=False, normalize_std=normalize_std)
    assert got.tolist() == [3.0, -1.0]


@pytest.mark.parametrize("reward", [NAN, INF, -INF])
def test_a_reward_is_finite(reward):
    with pytest.raises(ValueError, match=f"sample 1: reward {reward} is not finite; look at the reward function"):
        group_relative_rewards(scored([1.0, reward], [0, 0]), normalize_rewards=False, normalize_std=False)


# --- what a producer may not do


def with_value(name, place, value):
    def spoil(sample):
        array = getattr(sample, name)
        array = array.copy() if isinstance(array, np.ndarray) else list(array)
        array[place] = value
        setattr(sample, name, array)

    return spoil


def with_field(name, value):
    return lambda sample: setattr(sample, name, value(getattr(sample, name)) if callable(value) else value)


SPOILED = [
    *(
        (with_field(name, None), f"{name} is missing; its producer must fill it")
        for name in ("loss_mask", "rollout_log_probs", "reward", "rollout_topk_token_ids", "rollout_topk_log_probs")
    ),
    (
        with_field("rollout_log_probs", lambda rows: rows[:-1]),
        "rollout_log_probs has 2 rows for a response of 3 tokens",
    ),
    (with_field("rollout_log_probs", lambda rows: [0.0, *rows]), "rollout_log_probs has 4 rows for a response of 3"),
    (with_field("loss_mask", [1, 1]), "loss_mask has 2 rows for a response of 3"),
    (
        with_field("rollout_topk_token_ids", lambda rows: rows[1:]),
        "rollout_topk_token_ids has 2 rows for a response of 3",
    ),
    (
        with_field("rollout_topk_token_ids", lambda ids: ids.astype(np.int64)),
        r"token_ids are int64 \(3, 4\): give a numpy int32",
    ),
    (with_field("rollout_topk_log_probs", lambda rows: rows.tolist()), "log_probs are list: give a numpy float32"),
    (with_field("rollout_topk_log_probs", lambda rows: rows[:, :3]), r"token_ids \(3, 4\) and log_probs \(3, 3\)"),
    (with_value("rollout_log_probs", 1, NAN), r"rollout_log_probs\[1\] = nan on a trained token; .*finite"),
    (with_value("rollout_log_probs", 1, None), r"rollout_log_probs\[1\] = nan on a trained token"),
    (with_value("rollout_log_probs", 1, -INF), r"rollout_log_probs\[1\] = -inf on a trained token"),
    (
        with_value("rollout_log_probs", 1, np.finfo(np.float32).min.item()),
        r"rollout_log_probs\[1\] = -3\.4\S* on a trained",
    ),
    (with_value("rollout_log_probs", 2, 0.1), r"rollout_log_probs\[2\] = 0.1 on a trained token; .*at most 0"),
    (with_value("rollout_log_probs", 0, -9.0), "row 0: the sampled token's log-prob differs by .* rows shifted"),
    (with_value("rollout_topk_log_probs", (1, 2), NAN), "row 1, slot 2: log-prob nan"),
    (
        with_value("rollout_topk_log_probs", (1, 2), np.finfo(np.float32).min),
        "row 1, slot 2: log-prob -3.4.* stands for -inf",
    ),
    (
        with_value("rollout_topk_token_ids", (2, 1), VOCAB),
        f"row 2, slot 1: id {VOCAB} is outside the vocabulary of {VOCAB}",
    ),
    (with_value("rollout_topk_token_ids", 1, -1), "row 1, slot 0: log-prob .* in an unused slot"),
    (with_value("loss_mask", 1, 2), r"loss_mask\[1\] = 2; a token is trained \(1\) or not \(0\)"),
    (with_value("loss_mask", 2, -1), r"loss_mask\[2\] = -1"),
    (with_value("loss_mask", 0, 0.5), r"loss_mask\[0\] = 0.5"),
    (with_value("tokens", 1, VOCAB), f"token {VOCAB} at position 1 is outside the vocabulary of {VOCAB}"),
    (with_value("tokens", 4, -1), "token -1 at position 4 is outside the vocabulary"),
    (
        with_field("tokens", lambda tokens: tokens[len(PROMPT) :]),
        "no prompt token; a response's first token is scored by",
    ),
    (with_field("response_length", 9), "response_length 9 of 6 tokens"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_a_broken_sample_is_named(spoil, message):
    samples = rollout()
    spoil(samples[2])
    with pytest.raises(ValueError, match="sample 22[:,] .*" + message):
        convert(samples)


def test_a_trained_row_needs_candidates_and_an_untrained_one_may_hold_anything():
    samples = rollout()
    samples[1].rollout_topk_token_ids = np.full((2, K), -1, np.int32)
    samples[1].rollout_topk_log_probs = np.full((2, K), -INF, np.float32)
    with pytest.raises(ValueError, match="sample 21, row 0: no candidate on a trained token"):
        convert(samples)
    samples[1].loss_mask, samples[1].rollout_log_probs = [0, 0], [NAN, INF]
    data = convert(samples)
    assert data["loss_masks"][1].tolist() == [0, 0] and np.isnan(data["rollout_log_probs"][1][0])


def test_replay_needs_the_support():
    samples = rollout("support")
    samples[3].rollout_sampling_mask = None
    with pytest.raises(ValueError, match="sample 23: rollout_sampling_mask is missing"):
        convert(samples, "support")


def test_replay_needs_a_support_that_is_normalised_and_holds_the_token():
    samples = rollout("support")
    samples[3].rollout_topk_log_probs = samples[3].rollout_topk_log_probs - np.float32(0.01)
    with pytest.raises(ValueError, match=r"sample 23, row 0: the support's mass 0\.990\d+ is not 1"):
        convert(samples, "support")


def test_the_width_is_the_runs():
    with pytest.raises(ValueError, match="sample 20: 4 candidate slots and --rollout-top-logprobs-num 8: they must agree"):
        samples_to_train_data(rollout(), ScoreCenteringConfig(top_logprobs_num=8))


def test_a_rollout_has_samples():
    with pytest.raises(ValueError, match="no samples to convert"):
        convert([])


@pytest.mark.parametrize("mode", CONFIGS)
def test_an_empty_response_is_whole(mode):
    samples = [sample_with({"completion_tokens": 0}, mode=mode, index=i, group_index=0) for i in range(2)]
    for sample in samples:
        sample.reward = 1.0
    data = convert(samples, mode)
    assert data["response_lengths"] == [0, 0] and math.isfinite(sum(data["rewards"]))
    assert data["rollout_topk_log_probs"][0].shape == (0, K)
