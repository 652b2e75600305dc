"""Requests out, samples filled in, with an engine that answers from a script."""

import pytest

from miles_sc import ScoreCenteringConfig
from miles_sc.rollout.generate import generate_responses, greedy_responses
from miles_sc.rollout.sample import Sample
from tests.samples import PROMPT, VOCAB, K, answer, sample_with, state, support_answer

CONFIGS = {
    "off": ScoreCenteringConfig(temperature=0.7),
    "selected": ScoreCenteringConfig(top_logprobs_num=K, temperature=0.7),
    "support": ScoreCenteringConfig(top_logprobs_num=K, temperature=0.7, top_p=0.9, top_k=K),
}


class ScriptedEngine:
    def __init__(self, *metas):
        self.metas, self.requests = metas, []

    def generate(self, requests):
        self.requests += requests
        ids = [[entry[1] for entry in meta["output_token_logprobs"]] for meta in self.metas]
        return [{"output_ids": i, "meta_info": meta} for i, meta in zip(ids, self.metas, strict=True)]


def decode(token_ids):
    return " ".join(map(str, token_ids))


def fresh(count):
    return [Sample(tokens=[*PROMPT, i], index=10 + i) for i in range(count)]


def generate(engine, samples, mode="selected", **options):
    settings = dict(max_new_tokens=5, vocab_size=VOCAB, decode=decode, sampling_seeds=list(range(100, 100 + len(samples))))
    generate_responses(engine, samples, CONFIGS[mode], **settings | options)


@pytest.mark.parametrize("mode", CONFIGS)
def test_each_sample_gets_its_own_answer(mode):
    metas = [(support_answer if mode == "support" else answer)(rows, seed=rows) for rows in (1, 3)]
    samples = fresh(2)
    generate(ScriptedEngine(*metas), samples, mode)
    for i, (sample, meta) in enumerate(zip(samples, metas, strict=True)):
        expected = sample_with(meta, mode="selected" if mode == "off" else mode)
        assert sample.tokens == [*PROMPT, i, *expected.tokens[len(PROMPT) :]]
        assert sample.rollout_log_probs == expected.rollout_log_probs
        assert sample.response == decode(expected.tokens[len(PROMPT) :])
        assert sample.truncated and sample.weight_versions == ["7"] * sample.response_length
        if mode == "off":
            assert sample.candidates is None
        else:
            assert state(sample)["rollout_topk_log_probs"] == state(expected)["rollout_topk_log_probs"]


def test_the_request_is_the_prompt_the_sampler_and_the_seed():
    engine = ScriptedEngine(answer(1), answer(1))
    generate(engine, fresh(2))
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 5}
    for i, request in enumerate(engine.requests):
        assert request["input_ids"] == [*PROMPT, i]
        assert request["sampling_params"] == sampling | {"sampling_seed": 100 + i}
        assert request["return_logprob"] is True and request["top_logprobs_num"] == K


def test_without_recording_nothing_of_the_feature_is_sent():
    engine = ScriptedEngine(answer(1))
    generate(engine, fresh(1), "off")
    assert set(engine.requests[0]) == {"input_ids", "sampling_params", "return_logprob"}


def test_weights_that_change_during_a_response_are_kept_token_by_token():
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}]
    samples = fresh(1)
    generate(ScriptedEngine(answer(3) | {"weight_versions": spans}), samples)
    assert samples[0].weight_versions == ["7", "8", "8"]
    generate(ScriptedEngine(answer(2) | {"weight_version": "9"}), samples)
    assert samples[0].weight_versions == ["7", "8", "8", "9", "9"]


def test_tokens_before_anyone_tracked_versions_have_none():
    samples = [sample_with(answer(2))]
    generate(ScriptedEngine(answer(1)), samples)
    assert samples[0].weight_versions == ["", "", "7"]


@pytest.mark.parametrize(("reason", "truncated"), [("length", True), ("stop", False), ("abort", False)])
def test_truncated_means_stopped_by_its_length(reason, truncated):
    samples = fresh(1)
    generate(ScriptedEngine(answer(1) | {"finish_reason": {"type": reason}}), samples)
    assert samples[0].truncated is truncated


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_top_logprobs": None}, "sample 11: output_top_logprobs is missing"),
        (
            {"weight_versions": [{"version": "7", "start": 0, "end": 2}]},
            "sample 11: weight_versions = .* for 3 generated tokens: every token was sampled by one version",
        ),
    ],
)
def test_a_bad_answer_names_its_sample_and_leaves_it_alone(change, message):
    samples = fresh(3)
    with pytest.raises(ValueError, match=message):
        generate(ScriptedEngine(answer(), answer() | change, answer()), samples)
    assert state(samples[1]) == state(fresh(3)[1])


def test_an_answer_for_every_sample():
    engine = ScriptedEngine(answer())
    engine.generate = lambda requests: []
    with pytest.raises(ValueError, match="shorter"):
        generate(engine, fresh(1))


def test_evaluation_is_greedy_and_records_nothing():
    engine = ScriptedEngine(answer(2), answer(1))
    texts = greedy_responses(engine, [[1, 2], [3]], max_new_tokens=9, decode=decode)
    assert texts == [decode([entry[1] for entry in meta["output_token_logprobs"]]) for meta in engine.metas]
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 9}
    assert engine.requests == [{"input_ids": ids, "sampling_params": greedy} for ids in ([1, 2], [3])]
