"""Requests out, samples filled in, with an engine that answers from a script."""

import asyncio
import dataclasses

import pytest

from miles_sc import ScoreCenteringConfig
from miles_sc.rollout.generate import GenerationSettings, all_or_none, generate_response, greedy_responses
from miles_sc.rollout.sample import Sample
from tests.rollout.scripted_engine import ScriptedEngine
from tests.samples import PROMPT, VOCAB, K, answer, sample_with, state, support_answer

CONFIGS = {
    "off": ScoreCenteringConfig(temperature=0.7),
    "selected": ScoreCenteringConfig(top_logprobs_num=K, temperature=0.7),
    "support": ScoreCenteringConfig(top_logprobs_num=K, temperature=0.7, top_p=0.9, top_k=K),
}


def decode(token_ids):
    return " ".join(map(str, token_ids))


def settings(mode="selected", max_response_len=5):
    return GenerationSettings(CONFIGS[mode], max_response_len, VOCAB, decode)


def fresh(count):
    return [Sample(tokens=[*PROMPT, i], index=10 + i) for i in range(count)]


def generate(engine, samples, mode="selected", max_response_len=5):
    async def run():
        await all_or_none(
            generate_response(engine, sample, settings(mode, max_response_len), sampling_seed=100 + i)
            for i, sample in enumerate(samples)
        )

    asyncio.run(run())


def finished(meta, reason):
    return meta | {"finish_reason": {"type": reason}}


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


@pytest.mark.parametrize(
    ("reason", "truncated", "aborted"), [("length", True, False), ("stop", False, False), ("abort", False, True)]
)
def test_how_a_response_ended(reason, truncated, aborted):
    samples = fresh(1)
    generate(ScriptedEngine(finished(answer(1), reason)), samples)
    assert (samples[0].truncated, samples[0].aborted, samples[0].turns) == (truncated, aborted, int(not aborted))


def test_a_response_that_was_aborted_is_continued_where_it_stopped():
    first, second = finished(answer(2, seed=1), "abort"), finished(answer(1, seed=2) | {"weight_version": "8"}, "stop")
    samples, engine = fresh(1), ScriptedEngine(first, second)
    generate(engine, samples)
    tokens, rows = list(samples[0].tokens), samples[0].rollout_topk_log_probs
    generate(engine, samples)
    assert engine.requests[1]["input_ids"] == tokens
    assert engine.requests[1]["sampling_params"]["max_new_tokens"] == 5 - 2
    expected = sample_with(first, second)
    assert samples[0].tokens[len(PROMPT) + 1 :] == expected.tokens[len(PROMPT) :]
    assert samples[0].rollout_log_probs == expected.rollout_log_probs
    # each call keeps the distribution of the weights that sampled it
    assert (samples[0].rollout_topk_log_probs[:2] == rows).all() and samples[0].weight_versions == ["7", "7", "8"]
    assert not samples[0].aborted and samples[0].turns == 1


@pytest.mark.parametrize("mode", CONFIGS)
def test_an_abort_before_the_first_token_leaves_a_sample_to_be_started(mode):
    nothing = {"output_token_logprobs": [], "completion_tokens": 0, "finish_reason": {"type": "abort", "message": "aborted"}}
    make = support_answer if mode == "support" else answer
    samples, engine = fresh(1), ScriptedEngine(nothing, make(2))
    generate(engine, samples, mode)
    assert samples[0].aborted and samples[0].response_length == 0
    generate(engine, samples, mode)
    assert engine.requests[0] == engine.requests[1]
    assert not samples[0].aborted and samples[0].response_length == 2


def test_a_response_without_room_is_truncated_without_a_call():
    samples, engine = fresh(1), ScriptedEngine(finished(answer(3), "abort"))
    generate(engine, samples)
    generate(engine, samples, max_response_len=3)
    assert samples[0].truncated and not samples[0].aborted and len(engine.requests) == 1


def test_an_aborted_sample_can_be_tried_again_from_its_prompt():
    samples, engine = fresh(1), ScriptedEngine(finished(answer(2, seed=1), "abort"), answer(3, seed=2))
    generate(engine, samples)
    samples[0].reset_for_retry()
    assert state(samples[0]) == state(fresh(1)[0])
    generate(engine, samples)
    assert engine.requests[0] == engine.requests[1] and samples[0].response_length == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_top_logprobs": None}, "sample 11: output_top_logprobs is missing"),
        (
            {"weight_versions": [{"version": "7", "start": 0, "end": 2}]},
            "sample 11: weight_versions = .* for 3 generated tokens: every token was sampled by one version",
        ),
        ({"weight_versions": ["7"]}, "sample 11: weight_versions = .*: wanted a list of spans"),
        ({"finish_reason": {"type": "error"}}, "sample 11: finish_reason = .*error.*: only stop, length and abort"),
        ({"finish_reason": None}, "sample 11: finish_reason = None: only stop, length and abort"),
    ],
)
def test_a_bad_answer_names_its_sample_and_leaves_it_alone(change, message):
    samples = fresh(3)
    with pytest.raises(ValueError, match=message):
        generate(ScriptedEngine(answer(), answer() | change, answer()), samples)
    assert state(samples[1]) == state(fresh(3)[1])


def test_the_first_failure_cancels_the_others():
    cancelled = []

    class Engine(ScriptedEngine):
        async def generate(self, request, read):
            if request["input_ids"][-1] == 0:
                return await super().generate(request, read)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(request["input_ids"][-1])
                raise

    with pytest.raises(ValueError, match="sample 10"):
        generate(Engine(answer() | {"output_top_logprobs": None}), fresh(3))
    assert sorted(cancelled) == [1, 2]


def test_evaluation_is_greedy_and_records_nothing():
    metas = answer(2), answer(1)
    engine = ScriptedEngine(*metas)
    responses = asyncio.run(greedy_responses(engine, [[1, 2], [3]], max_new_tokens=9))
    assert responses == [[entry[1] for entry in meta["output_token_logprobs"]] for meta in metas]
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 9}
    assert engine.requests == [{"input_ids": ids, "sampling_params": greedy} for ids in ([1, 2], [3])]


def test_an_abort_at_the_moment_of_the_stop_does_not_reopen_a_response():
    """SGLang says abort of a response that has just ended by itself."""
    samples, meta = fresh(2), finished(answer(2), "abort")
    stop = meta["output_token_logprobs"][-1][1]
    ending = dataclasses.replace(settings(), stop_token_ids=(stop,))
    for sample, how in zip(samples, (ending, settings()), strict=True):
        asyncio.run(generate_response(ScriptedEngine(meta), sample, how, sampling_seed=0))
    assert [(sample.aborted, sample.turns) for sample in samples] == [(False, 1), (True, 0)]


@pytest.mark.parametrize("tokens", [3, 5, None])
def test_an_answer_to_another_or_a_cut_prompt_is_refused(tokens):
    samples = fresh(1)
    with pytest.raises(ValueError, match=f"sample 10: prompt_tokens = {tokens} and 4 were sent: the answer belongs to another"):
        generate(ScriptedEngine(answer(2) | {"prompt_tokens": tokens}), samples)
    generate(ScriptedEngine(answer(2) | {"prompt_tokens": 4}), samples)
    assert samples[0].response_length == 2
