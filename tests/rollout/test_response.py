"""What answers append to a sample, each form of a known one, and what the sample itself must be."""

from types import SimpleNamespace

import numpy as np
import pytest

from miles_sc.rollout import append_candidates
from miles_sc.rollout.sample import Sample
from tests.samples import (
    FORMS,
    PROMPT,
    VOCAB,
    K,
    answer,
    in_form,
    log_distributions,
    sample_with,
    state,
    support_answer,
)

TOKENS, TOP = "output_token_logprobs", "output_top_logprobs"


# --- every form of a known answer


@pytest.mark.parametrize("form", FORMS)
def test_values_land_where_they_belong(form):
    sample = sample_with(answer(form=form))
    log_q = log_distributions(3)
    order = np.argsort(-log_q, axis=1)
    np.testing.assert_array_equal(sample.rollout_topk_token_ids, order[:, :K])
    np.testing.assert_array_equal(sample.rollout_topk_log_probs, np.take_along_axis(log_q, order[:, :K], axis=1))
    assert sample.tokens == [*PROMPT, order[0, 0], order[1, K + 1], order[2, 0]]
    assert sample.rollout_log_probs == pytest.approx(log_q[np.arange(3), sample.tokens[3:]].tolist())
    assert (sample.rollout_topk_token_ids.dtype, sample.rollout_topk_log_probs.dtype) == (np.int32, np.float32)


def test_support_values_land_where_they_belong():
    meta = support_answer(4)
    sample = sample_with(meta, mode="support")
    for row, (ids, values) in enumerate(
        zip(meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"], strict=True)
    ):
        assert sample.rollout_topk_token_ids[row].tolist() == ids + [-1] * (K - len(ids))
        assert sample.rollout_topk_log_probs[row].tolist() == pytest.approx(values + [-np.inf] * (K - len(values)))
        assert sample.rollout_log_probs[row] == pytest.approx(values[ids.index(sample.tokens[3 + row])])
    assert sample.rollout_sampling_mask.lengths.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("form", FORMS)
def test_calls_append_below_each_other(form):
    first, second = answer(2, seed=1), answer(3, seed=2, form=form)
    both, apart = sample_with(first, second), sample_with(second)
    assert both.response_length == 5 and both.loss_mask == [1] * 5
    assert both.tokens[-3:] == apart.tokens[-3:] and both.rollout_log_probs[-3:] == apart.rollout_log_probs
    np.testing.assert_array_equal(both.rollout_topk_token_ids[2:], apart.rollout_topk_token_ids)
    np.testing.assert_array_equal(both.rollout_topk_log_probs[2:], apart.rollout_topk_log_probs)


def test_support_calls_append_below_each_other():
    both = sample_with(support_answer(2, seed=1), support_answer(3, seed=2), mode="support")
    assert both.rollout_sampling_mask.lengths.tolist() == [1, 2, 1, 2, 3]
    assert both.rollout_sampling_mask.padded(K).tolist() == both.rollout_topk_token_ids.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_a_vocabulary_below_k_fills_fewer_slots(form):
    sample = Sample(tokens=list(PROMPT))
    full = answer(2) | {TOP: [[[-9.0, i, None] for i in range(VOCAB)]] * 2, TOKENS: [[-9.0, 1, None]] * 2}
    append_candidates(sample, in_form(full, form), k=VOCAB + 2, vocab_size=VOCAB)
    assert sample.rollout_topk_token_ids.tolist() == [[*range(VOCAB), -1, -1]] * 2
    assert np.isneginf(sample.rollout_topk_log_probs[:, VOCAB:]).all()
    with pytest.raises(ValueError, match=f"{VOCAB} candidates came and {VOCAB + 2} were asked for"):
        append_candidates(Sample(tokens=list(PROMPT)), in_form(full, form), k=VOCAB + 2)


@pytest.mark.parametrize("mode", ["selected", "support"])
@pytest.mark.parametrize("fields", [{}, {"output_token_logprobs": []}, {"output_token_logprobs": None}])
def test_no_token_needs_no_field(mode, fields):
    sample = sample_with(answer(2) if mode == "selected" else support_answer(2), mode=mode)
    before = state(sample)
    append_candidates(sample, {"completion_tokens": 0, **fields}, k=K, mode=mode, vocab_size=VOCAB)
    assert state(sample) == before


def test_the_hosts_sample_needs_only_the_named_fields():
    names = (
        "tokens",
        "response_length",
        "loss_mask",
        "rollout_log_probs",
        "rollout_topk_token_ids",
        "rollout_topk_log_probs",
        "rollout_sampling_mask",
    )
    ours = Sample(tokens=list(PROMPT))
    theirs = SimpleNamespace(**{name: getattr(ours, name) for name in names})
    for sample in (ours, theirs):
        append_candidates(sample, support_answer(), k=K, mode="support", vocab_size=VOCAB)
    assert set(vars(theirs)) == set(names) and theirs.response_length == 3
    assert state(Sample(**vars(theirs))) == state(ours)


def test_the_samples_own_lists_are_not_written_to():
    sample = sample_with(answer(2))
    tokens, log_probs, mask, ids = (
        sample.tokens,
        sample.rollout_log_probs,
        sample.loss_mask,
        sample.rollout_topk_token_ids,
    )
    lengths = [len(value) for value in (tokens, log_probs, mask, ids)]
    append_candidates(sample, answer(2, seed=5), k=K, vocab_size=VOCAB)
    assert [len(value) for value in (tokens, log_probs, mask, ids)] == lengths


# --- what the sample itself must be


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"rollout_topk_token_ids": None}, "token_ids are NoneType"),
        (
            {"rollout_log_probs": [-1.0]},
            "rollout_log_probs has 1 entries for a response of 3 tokens: the sample is misaligned",
        ),
        ({"rollout_log_probs": None}, "rollout_log_probs has 0 entries for a response of 3"),
        ({"loss_mask": [1, 1]}, "loss_mask has 2 entries for a response of 3"),
        ({"response_length": 2}, "rollout_log_probs has 3 entries for a response of 2 tokens"),
        (
            {"response_length": 2, "rollout_log_probs": [-1.0] * 2, "loss_mask": [1] * 2},
            r"candidates \(3, 4\) for 2 response tokens and k = 4",
        ),
        ({"rollout_topk_token_ids": None, "rollout_topk_log_probs": None}, "3 response tokens without candidates"),
    ],
)
def test_a_misaligned_sample_is_not_extended(spoil, message):
    sample = sample_with(answer())
    for name, value in spoil.items():
        setattr(sample, name, value)
    before = state(sample)
    with pytest.raises(ValueError, match=message):
        append_candidates(sample, answer(seed=1), k=K, vocab_size=VOCAB)
    assert state(sample) == before


def test_one_run_has_one_kind_of_sampling_and_one_k():
    cases = [
        (sample_with(answer()), support_answer(), "support", K, "earlier tokens lack their sampling support"),
        (
            sample_with(support_answer(), mode="support"),
            answer(),
            "selected",
            K,
            "holds a .*support and this call was unfiltered",
        ),
        (sample_with(answer()), answer(k=K + 1), "selected", K + 1, r"\(3, 4\) for 3 response tokens and k = 5"),
    ]
    for sample, meta, mode, k, message in cases:
        before = state(sample)
        with pytest.raises(ValueError, match=message):
            append_candidates(sample, meta, k=k, mode=mode, vocab_size=VOCAB)
        assert state(sample) == before


def test_a_missing_loss_mask_means_that_all_are_trained():
    sample = sample_with(answer())
    sample.loss_mask = None
    append_candidates(sample, answer(seed=1), k=K, vocab_size=VOCAB)
    assert sample.loss_mask == [1] * 6
