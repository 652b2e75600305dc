"""The life of a sample: whatever happens to it, every response token keeps exactly one row of everything."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_sc.rollout import append_candidates
from miles_sc.rollout.sample import Sample
from tests.samples import PROMPT, VOCAB, K, answer, sample_with, state, support_answer

MODES = {"selected": answer, "support": support_answer}


@pytest.mark.parametrize("mode", MODES)
def test_an_observation_is_a_gap_that_nobody_trains_on(mode):
    sample = sample_with(MODES[mode](2), mode=mode)
    sample.weight_versions = ["7", "7"]
    before = state(sample)
    sample.append_observation([9, 8])
    assert sample.tokens == [*before["tokens"], 9, 8] and sample.response_length == 4
    assert sample.loss_mask == [1, 1, 0, 0]
    assert sample.rollout_log_probs == [*before["rollout_log_probs"], 0.0, 0.0]
    assert sample.weight_versions == ["7", "7", "", ""]
    assert sample.rollout_topk_token_ids[2:].tolist() == [[-1] * K] * 2
    assert np.isneginf(sample.rollout_topk_log_probs[2:]).all()
    if mode == "support":
        assert sample.rollout_sampling_mask.padded(K)[2:].tolist() == [[9, -1, -1, -1], [8, -1, -1, -1]]
    else:
        assert sample.rollout_sampling_mask is None


@pytest.mark.parametrize("mode", MODES)
def test_strip_undoes_what_was_appended(mode):
    sample = sample_with(MODES[mode](3), mode=mode)
    before = state(sample)
    sample.append_observation([5])
    append_candidates(sample, MODES[mode](2, seed=1), k=K, mode=mode, vocab_size=VOCAB)
    sample.strip_last_output_tokens(3)
    assert state(sample) == before
    sample.strip_last_output_tokens(0)
    assert state(sample) == before


def test_strip_copies_no_candidate():
    sample = sample_with(answer(3))
    whole = sample.rollout_topk_token_ids
    sample.strip_last_output_tokens(1)
    assert np.shares_memory(sample.rollout_topk_token_ids, whole)


@pytest.mark.parametrize("count", [-1, 4])
def test_strip_takes_response_tokens_only(count):
    sample = sample_with(answer(3))
    before = state(sample)
    with pytest.raises(ValueError, match=rf"cannot strip {count} tokens of a response of 3: give 0\.\.3"):
        sample.strip_last_output_tokens(count)
    assert state(sample) == before


@pytest.mark.parametrize(("length", "kept", "truncated"), [(0, 0, True), (2, 2, True), (3, 3, False), (9, 3, False)])
def test_truncate_keeps_the_first_tokens_and_says_so(length, kept, truncated):
    sample = sample_with(answer(3))
    first = sample.tokens[: len(PROMPT) + kept]
    sample.truncate(length)
    assert (sample.tokens, sample.response_length, sample.truncated) == (first, kept, truncated)
    sample.check_rows()


def test_reset_leaves_the_prompt_and_nothing_of_the_response():
    sample = sample_with(support_answer(), mode="support", index=4, group_index=2)
    sample.weight_versions, sample.reward, sample.response, sample.truncated = ["7"] * 3, 1.0, "text", True
    sample.reset_for_retry()
    assert state(sample) == state(Sample(tokens=list(PROMPT), index=4, group_index=2))


@pytest.mark.parametrize("mode", MODES)
def test_a_retry_holds_the_second_attempt_alone(mode):
    sample = sample_with(MODES[mode](3, seed=1), mode=mode)
    sample.reset_for_retry()
    append_candidates(sample, MODES[mode](2, seed=2), k=K, mode=mode, vocab_size=VOCAB)
    assert state(sample) == state(sample_with(MODES[mode](2, seed=2), mode=mode))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_mask", [1]),
        ("rollout_log_probs", [-1.0] * 4),
        ("rollout_topk_token_ids", np.zeros((2, K), np.int32)),
        ("rollout_topk_log_probs", np.zeros((4, K), np.float32)),
        ("rollout_sampling_mask", sample_with(support_answer(2), mode="support").rollout_sampling_mask),
        ("weight_versions", ["7"]),
    ],
)
@pytest.mark.parametrize("operation", [Sample.check_rows, lambda s: s.append_observation([1]), lambda s: s.truncate(1)])
def test_a_misaligned_field_is_named_and_nothing_is_changed(name, value, operation):
    sample = sample_with(answer(3), index=6)
    setattr(sample, name, value)
    before = state(sample)
    with pytest.raises(ValueError, match=f"sample 6: {name} has {len(value)} rows for a response of 3 tokens; .*exactly one"):
        operation(sample)
    assert state(sample) == before


@pytest.mark.parametrize("length", [-1, 4])
def test_a_response_lies_within_the_tokens(length):
    with pytest.raises(ValueError, match=f"sample 1: response_length {length} of 3 tokens"):
        Sample(tokens=list(PROMPT), response_length=length, index=1).check_rows()


@pytest.mark.parametrize("missing", ["loss_mask", "rollout_log_probs"])
def test_an_observation_cannot_follow_tokens_of_which_nothing_is_known(missing):
    sample = sample_with(answer(3), index=6)
    setattr(sample, missing, None)
    before = state(sample)
    with pytest.raises(ValueError, match="sample 6: its 3 response tokens lack loss_mask or rollout_log_probs; fill both"):
        sample.append_observation([1])
    assert state(sample) == before


def test_half_a_pair_of_arrays_is_no_candidates():
    sample = sample_with(answer(3))
    sample.rollout_topk_log_probs = None
    with pytest.raises(ValueError, match="log_probs are NoneType"):
        _ = sample.candidates


STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 3)),
    st.tuples(st.just("observe"), st.integers(0, 2)),
    st.tuples(st.just("strip"), st.integers(0, 3)),
    st.tuples(st.just("truncate"), st.integers(0, 8)),
    st.tuples(st.just("reset"), st.just(0)),
)


@pytest.mark.parametrize("mode", MODES)
@given(steps=st.lists(STEPS, max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_life_keeps_the_rows_aligned(mode, steps):
    """Against a list of rows, one tuple a token, that the same steps are applied to."""
    sample, rows = Sample(tokens=list(PROMPT)), []
    for seed, (step, count) in enumerate(steps):
        if step == "append":
            meta = MODES[mode](count, seed=seed)
            if sample.candidates is None and rows:
                # an observation came first, and how wide its gap row would be nobody knows
                before = state(sample)
                with pytest.raises(ValueError, match="response tokens without candidates"):
                    append_candidates(sample, meta, k=K, mode=mode, vocab_size=VOCAB)
                assert state(sample) == before
                continue
            append_candidates(sample, meta, k=K, mode=mode, vocab_size=VOCAB)
            rows += generated_rows(sample_with(meta, mode=mode))
        elif step == "observe":
            sample.append_observation([2] * count)
            rows += [(2, 0, 0.0, [-1] * K, [-np.inf] * K)] * count
        elif step == "strip":
            count = min(count, len(rows))
            sample.strip_last_output_tokens(count)
            rows = rows[: len(rows) - count]
        elif step == "truncate":
            sample.truncate(count)
            rows = rows[:count]
        else:
            sample.reset_for_retry()
            rows = []
        sample.check_rows()
        assert sample.tokens[: len(PROMPT)] == PROMPT and sample.response_length == len(rows)
        assert generated_rows(sample) == rows or sample.candidates is None
        assert [row[:3] for row in rows] == scalar_rows(sample)
        if sample.rollout_sampling_mask is not None:
            # each row's support is its candidates, and an observation's the token itself
            expected = [sorted({i for i in row[3] if i >= 0} or {row[0]}) for row in rows]
            assert [sorted(set(ids) - {-1}) for ids in sample.rollout_sampling_mask.padded(K).tolist()] == expected


def scalar_rows(sample):
    tokens = sample.tokens[len(sample.tokens) - sample.response_length :]
    return list(zip(tokens, sample.loss_mask or [], sample.rollout_log_probs or [], strict=True))


def generated_rows(sample):
    if sample.candidates is None:
        return []
    ids, log_probs = sample.rollout_topk_token_ids.tolist(), sample.rollout_topk_log_probs.tolist()
    return [(*scalars, *rest) for scalars, *rest in zip(scalar_rows(sample), ids, log_probs, strict=True)]
