"""A micro-batch's tensors: each response row points at the logits that predict it."""

import numpy as np
import pytest
import torch

from miles_sc import ScoreCenteringConfig
from miles_sc.data.conversion import samples_to_train_data
from miles_sc.data.micro_batch import build_micro_batch
from tests.samples import PROMPT, VOCAB, K, answer, sample_with, support_answer

CPU = torch.device("cpu")
PAD = 11
CONFIGS = {
    "off": ScoreCenteringConfig(),
    "selected": ScoreCenteringConfig(top_logprobs_num=K),
    "support": ScoreCenteringConfig(top_logprobs_num=K, top_p=0.9, top_k=K),
}


def samples(mode):
    """Responses of 2, 0, 3 + an observation, 1 tokens, under prompts of different length."""
    produce = support_answer if mode == "support" else answer
    made = []
    for i, rows in enumerate((2, 0, 3, 1)):
        sample = sample_with(produce(rows, seed=i), mode="support" if mode == "support" else "selected", index=50 + i)
        sample.tokens = [i] * i + sample.tokens
        sample.reward = float(i)
        if i == 2:
            sample.append_observation([6])
        made.append(sample)
    return made


def train_data(mode):
    data = samples_to_train_data(samples(mode), CONFIGS[mode], vocab_size=VOCAB, normalize_rewards=False)
    data["row_weights"] = [0.125, 0.0, 0.25, 0.5]
    # as they come out of shared memory
    for column in data.values():
        for entry in column:
            if isinstance(entry, np.ndarray):
                entry.flags.writeable = False
    return data


def build(mode="selected", members=(0, 1, 2, 3), data=None):
    return build_micro_batch(data or train_data(mode), members, CPU, pad_token_id=PAD)


def expected(members, value):
    """``value(sample)`` of each member, one list after the other."""
    made = samples("selected")
    return [x for i in members for x in value(made[i])]


@pytest.mark.parametrize("members", [[0], [2, 0], [1], [3, 1, 2, 0]])
def test_rows_follow_the_members(members):
    batch, lengths = build(members=members), [samples("selected")[i].response_length for i in members]
    response = expected(members, lambda sample: sample.tokens[len(sample.tokens) - sample.response_length :])
    assert batch.loss.token_ids.tolist() == response
    # the token after a row's position is the one it predicts
    flat = batch.input_ids.flatten()
    assert flat[batch.rows + 1].tolist() == response
    width = batch.input_ids.shape[1]
    assert (batch.rows // width).tolist() == [place for place, length in enumerate(lengths) for _ in range(length)]
    weights, rewards = [0.125, 0.0, 0.25, 0.5], [0.0, 1.0, 2.0, 3.0]
    assert batch.loss.weights.tolist() == [weights[i] for i, n in zip(members, lengths, strict=True) for _ in range(n)]
    assert batch.loss.advantages.tolist() == [rewards[i] for i, n in zip(members, lengths, strict=True) for _ in range(n)]
    assert batch.loss.active.tolist() == [bool(x) for x in expected(members, lambda sample: sample.loss_mask)]
    assert batch.loss.rollout_log_probs.tolist() == pytest.approx(expected(members, lambda sample: sample.rollout_log_probs))


def test_sequences_are_padded_on_the_right():
    batch = build(members=[1, 2])
    whole = samples("selected")
    assert batch.input_ids.tolist() == [
        whole[1].tokens + [PAD] * (len(whole[2].tokens) - len(whole[1].tokens)),
        whole[2].tokens,
    ]
    assert batch.input_ids.dtype == batch.rows.dtype == batch.loss.token_ids.dtype == torch.int64


@pytest.mark.parametrize("mode", CONFIGS)
@pytest.mark.parametrize("members", [[0, 1, 2, 3], [2], [1]])
def test_candidates_are_the_samples_own(mode, members):
    loss = build(mode, members).loss
    if mode == "off":
        assert loss.selected_ids.shape[1] == 1 and loss.candidate_log_probs is None
        return
    whole = [samples(mode)[i] for i in members]
    assert loss.candidate_ids.tolist() == [row for sample in whole for row in sample.rollout_topk_token_ids.tolist()]
    assert loss.candidate_log_probs.tolist() == [row for sample in whole for row in sample.rollout_topk_log_probs.tolist()]
    assert loss.candidate_ids.dtype == torch.int64 and loss.candidate_ids.shape[1] == K


def test_compact_and_dense_supports_are_the_same_to_the_loss():
    data = train_data("support")
    assert data["rollout_topk_token_ids"] == [None] * 4
    compact = build(data=data).loss.candidate_ids
    mixed = data | {
        "rollout_topk_token_ids": [
            sample.rollout_topk_token_ids if i >= 2 else None for i, sample in enumerate(samples("support"))
        ]
    }
    assert torch.equal(build(data=mixed).loss.candidate_ids, compact)


@pytest.mark.parametrize("name", ["old_log_probs", "ref_log_probs"])
def test_scores_of_other_policies_travel_along(name):
    data, lengths = train_data("selected"), [2, 0, 4, 1]
    assert getattr(build(data=data).loss, name) is None
    data[name] = [np.full(length, -0.5 - i, np.float32) for i, length in enumerate(lengths)]
    assert getattr(build(data=data, members=[3, 0]).loss, name).tolist() == [-3.5, -0.5, -0.5]


@pytest.mark.parametrize("mode", CONFIGS)
def test_no_member_still_gives_a_forward_pass_and_no_row(mode):
    data = train_data(mode) | {"old_log_probs": [np.zeros(n, np.float32) for n in (2, 0, 4, 1)]}
    batch = build(data=data, members=[])
    assert batch.input_ids.tolist() == [[PAD]] and batch.rows.numel() == 0 and batch.sample_indices == ()
    filled = build(data=data)
    for name, value in vars(filled.loss).items():
        empty = getattr(batch.loss, name)
        if value is None:
            assert empty is None, name
        else:
            assert empty.shape == (0, *value.shape[1:]) and empty.dtype == value.dtype, name


def test_a_row_can_say_where_it_is_from():
    batch = build(members=[2, 1, 0])
    names = [batch.describe(row) for row in range(6)]
    assert names[:4] == [f"sample 52, response token {i}" for i in range(4)]
    assert names[4:] == ["sample 50, response token 0", "sample 50, response token 1"]


def test_tensors_are_writable_copies():
    data = train_data("selected")
    build(data=data).loss.candidate_log_probs.zero_()
    assert data["rollout_topk_log_probs"][0].any()
    assert PROMPT == data["tokens"][0].tolist()[:3]


@pytest.mark.parametrize("key", ["rollout_log_probs", "rollout_topk_log_probs", "loss_masks", "old_log_probs"])
def test_a_column_of_another_length_is_refused(key):
    """One short and the next one long would otherwise cancel into shifted rows."""
    data = train_data("selected") | {"old_log_probs": [np.zeros(n, np.float32) for n in (2, 0, 4, 1)]}
    data[key] = list(data[key])
    data[key][0], data[key][2] = data[key][0][:-1], np.concatenate([data[key][2], data[key][2][:1]])
    with pytest.raises(ValueError, match=f"sample 50: {key} has 1 rows and the response 2 tokens"):
        build(data=data)
