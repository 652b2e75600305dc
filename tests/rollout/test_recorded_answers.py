"""What a real SGLang and a real router have answered."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from miles_sc.rollout import append_candidates
from miles_sc.rollout.answer import read_generated_tokens
from miles_sc.rollout.response import append_generated_tokens
from miles_sc.rollout.sample import Sample
from tests.samples import PROMPT, state

RECORDED = Path(__file__).parents[1] / "fixtures"
RECORDED_VOCAB = 512


def recorded(name):
    """``meta_info`` of a recorded answer; {} where the server sent none."""
    response = json.loads((RECORDED / f"{name}.json").read_text())["response"]
    return (response["choices"][0] if "choices" in response else response).get("meta_info") or {}


def first_candidate(meta):
    """(id, log-prob) of the first row's first candidate, read by hand."""
    if "output_top_logprobs" in meta:
        return meta["output_top_logprobs"][0][0][1::-1]
    if "output_token_sampling_mask" in meta:
        return [meta["output_token_sampling_mask"][0][0], meta["output_token_sampling_logprobs"][0][0]]
    ids, values = (meta.get(f"output_top_logprobs_{name}_flat") for name in ("idx", "val"))
    if ids is None:
        ids = np.frombuffer(base64.b64decode(meta["output_top_logprobs_idx_flat_b64"]), "<i4")
        values = np.frombuffer(base64.b64decode(meta["output_top_logprobs_val_flat_b64"]), "<f4")
    return [ids[0], values[0]]


DIRECT, ROUTER = "sglang-0.5.23", "sglang-router-0.3.2"
READABLE = [  # name, mode, k, generated tokens
    (f"{DIRECT}/generate_selected", "selected", 8, 6),
    (f"{DIRECT}/generate_selected_flat", "selected", 8, 6),
    (f"{DIRECT}/generate_selected_flat_b64", "selected", 8, 6),
    (f"{DIRECT}/generate_one_token", "selected", 8, 1),
    (f"{DIRECT}/generate_stop_string", "selected", 8, 15),
    (f"{DIRECT}/generate_support", "support", 8, 6),
    (f"{DIRECT}/chat_selected", "selected", 25, 6),
    (f"{DIRECT}/chat_selected_flat_b64", "selected", 25, 6),
    (f"{DIRECT}/chat_support", "support", 8, 6),
    (f"{ROUTER}/generate_selected", "selected", 8, 6),
    (f"{ROUTER}/generate_selected_flat", "selected", 8, 6),
    (f"{ROUTER}/generate_selected_flat_b64", "selected", 8, 6),
    (f"{ROUTER}/generate_one_token", "selected", 8, 1),
]


@pytest.mark.parametrize(("name", "mode", "k", "rows"), READABLE)
def test_recorded_answers_are_read(name, mode, k, rows):
    meta, sample = recorded(name), Sample(tokens=[5, 6, 7])
    append_candidates(sample, meta, k=k, mode=mode, vocab_size=RECORDED_VOCAB)
    tokens = [entry[1] for entry in meta["output_token_logprobs"]]
    assert sample.response_length == len(tokens) == rows
    assert sample.tokens == [5, 6, 7, *tokens]
    assert sample.loss_mask == [1] * rows
    assert sample.rollout_topk_token_ids.shape == sample.rollout_topk_log_probs.shape == (rows, k)
    assert [sample.rollout_topk_token_ids[0, 0], sample.rollout_topk_log_probs[0, 0]] == pytest.approx(first_candidate(meta))
    if mode == "selected":
        assert sample.rollout_log_probs == [entry[0] for entry in meta["output_token_logprobs"]]
        assert sample.rollout_sampling_mask is None
    else:
        mass = np.exp(sample.rollout_topk_log_probs.astype(np.float64)).sum(axis=1)
        np.testing.assert_allclose(mass, 1, atol=1e-5)
        # after filtering a token is likelier than it was over the whole vocabulary
        assert all(q > entry[0] for q, entry in zip(sample.rollout_log_probs, meta["output_token_logprobs"], strict=True))
        assert sample.rollout_sampling_mask.padded(k).tolist() == sample.rollout_topk_token_ids.tolist()


@pytest.mark.parametrize("server", [DIRECT, ROUTER])
@pytest.mark.parametrize("mode", ["selected", "support"])
def test_no_token_has_no_row_whatever_stray_row_comes(server, mode):
    meta = recorded(f"{server}/generate_zero_tokens")
    assert len(meta["output_top_logprobs"]) == 1
    sample = Sample(tokens=[5, 6, 7])
    append_candidates(sample, meta, k=8, mode=mode, vocab_size=RECORDED_VOCAB)
    assert (sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs) == ([5, 6, 7], 0, [], [])
    assert sample.rollout_topk_token_ids.shape == (0, 8) and sample.rollout_topk_token_ids.dtype == np.int32
    assert sample.rollout_topk_log_probs.shape == (0, 8) and sample.rollout_topk_log_probs.dtype == np.float32
    assert (sample.rollout_sampling_mask is None) == (mode == "selected")


UNREADABLE = [  # name, mode, k, message
    (f"{DIRECT}/chat_generic_openai", "selected", 5, "output_token_logprobs is missing .*return_meta_info"),
    (f"{DIRECT}/generate_greedy_evaluation", "selected", 8, "output_top_logprobs is missing: 8 candidates were"),
    (f"{DIRECT}/generate_selected", "selected", 9, "row 0: 8 candidates came and 9 were asked for; .*route"),
    (f"{DIRECT}/generate_selected_flat", "selected", 7, r"_shape = \[6, 8\]: 8 candidates came and 7 were asked"),
    (f"{DIRECT}/generate_support", "support", 7, "row 0: .*exceeds the arrays, 8 ids for 7 slots; raise"),
    (f"{ROUTER}/chat_support", "support", 8, "output_token_logprobs is missing from meta_info"),
    (f"{ROUTER}/generate_support", "support", 8, "output_token_sampling_mask is missing from an answer .*; .*route"),
    (f"{ROUTER}/generate_support_without_top_k", "support", 8, "output_token_sampling_mask is missing"),
]


@pytest.mark.parametrize(("name", "mode", "k", "message"), UNREADABLE)
def test_recorded_answers_that_lack_something_are_refused(name, mode, k, message):
    sample = Sample(tokens=[5, 6, 7])
    with pytest.raises(ValueError, match=message):
        append_candidates(sample, recorded(name), k=k, mode=mode, vocab_size=RECORDED_VOCAB)
    assert state(sample) == state(Sample(tokens=[5, 6, 7]))


def test_every_recorded_answer_is_tested():
    names = {f"{path.parent.name}/{path.stem}" for path in RECORDED.glob("*/*.json")}
    zero = {f"{server}/generate_zero_tokens" for server in (DIRECT, ROUTER)}
    assert names == {name for name, *_ in READABLE + UNREADABLE} | zero


def test_without_recording_the_sampled_tokens_alone_are_appended():
    sample, meta = Sample(tokens=list(PROMPT)), recorded(f"{DIRECT}/generate_greedy_evaluation")
    append_generated_tokens(sample, read_generated_tokens(meta, k=0, vocab_size=RECORDED_VOCAB))
    assert sample.tokens == [*PROMPT, 411, 128, 293, 54, 417, 293]
    assert sample.rollout_log_probs == [entry[0] for entry in meta["output_token_logprobs"]] and sample.loss_mask == [1] * 6
    assert sample.candidates is None and sample.rollout_sampling_mask is None
