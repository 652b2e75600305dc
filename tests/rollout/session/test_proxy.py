"""What the engine is sent: our fields forced, the client's own kept, everything unrecordable refused."""

import dataclasses

import pytest

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.session.proxy import Wishes, added_fields, client_reply, engine_request
from tests.rollout.session.turns import answer, config

MESSAGES = [{"role": "user", "content": "hi"}]
RECORDING = {"logprobs": True, "return_meta_info": True, "return_prompt_token_ids": True}
SAMPLER = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


def requested(body, config=config()):  # noqa: B008
    body = {"messages": MESSAGES} | body
    before = repr(body)
    request = engine_request(config, body, Wishes.of(body))
    assert repr(body) == before
    return request


def test_candidates_are_asked_for_in_the_compact_form():
    flat = {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    own = {"messages": MESSAGES, "model": "m", "stop": ["x"], "seed": 1}
    request = requested(own | {"top_logprobs": 2, "return_sampling_mask": True})
    request.pop("repetition_penalty", None)
    assert request == own | RECORDING | SAMPLER | flat | {"top_logprobs": 6}


def test_the_support_is_asked_for_when_sampling_is_filtered():
    request = requested({"top_logprobs": 2}, config("support"))
    request.pop("repetition_penalty", None)
    support = {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
    assert request == {"messages": MESSAGES} | RECORDING | SAMPLER | support | {"top_k": 5}


@pytest.mark.parametrize(
    "own", [{}, {"temperature": 0.3, "min_p": 0.1, "top_k": 3, "response_format": {"type": "json_object"}, "top_logprobs": 2}]
)
def test_without_recording_the_sampler_is_the_clients(own):
    assert requested(own, ScoreCenteringConfig()) == {"messages": MESSAGES} | own | RECORDING


def test_a_stream_is_asked_for_in_one_piece():
    streamed = requested({"stream": True, "stream_options": {"include_usage": True}})
    assert streamed == requested({})


def test_alternatives_with_their_texts_are_asked_for_when_the_client_wants_them():
    request = requested({"logprobs": True, "top_logprobs": 3})
    assert request["top_logprobs"] == 6 and not any(name.startswith("return_flat") for name in request)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": 2}, "n = 2: a session's turn has one answer"),
        ({"n": 0}, "n = 0: a session's turn has one answer"),
        ({"logprobs": True, "top_logprobs": 7}, "top_logprobs = 7: the run records --rollout-top-logprobs-num 6"),
        ({"top_logprobs": -1}, "top_logprobs = -1: give a number"),
        ({"top_logprobs": True}, "top_logprobs = True: give a number"),
        ({"top_logprobs": "5"}, "top_logprobs = '5': give a number"),
        ({"logprobs": 1}, "logprobs = 1: give true or false"),
        ({"stream": "yes"}, "stream = 'yes': give true or false"),
        ({"stream_options": [1]}, "stream_options = .*give an object"),
        ({"messages": None}, "messages = None: give a list of objects"),
        ({"messages": ["hi"]}, "messages = .*give a list of objects"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "tool_calls = 3: give a list"),
        ({"tools": {}}, "tools = .*give a list of objects"),
        ({"tools": [{"function": "add"}]}, "function = add: give an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type image_url: a Sample holds token ids alone"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "type input_audio"),
        ({"min_p": 0.1}, "min_p = 0.1"),
        ({"temperature": 0.5}, "temperature = 0.5"),
        ({"top_k": 3}, "top_k = 3"),
        ({"regex": "a"}, "regex = 'a'"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [{}]}, "tool_choice = 'required'"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
    ],
)
def test_what_cannot_be_recorded_is_refused(body, message):
    with pytest.raises(ValueError, match=message):
        requested(body)


def test_alternatives_are_refused_when_sampling_is_filtered():
    with pytest.raises(ValueError, match="top_logprobs = 3 while sampling is filtered"):
        requested({"logprobs": True, "top_logprobs": 3}, config("support"))


def test_text_in_parts_is_no_image():
    assert requested({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, "there"]}]})


def test_what_was_added_is_told():
    assert added_fields({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": True}) == {"b": 3, "c": True}


def test_fewer_alternatives_than_the_client_wants_are_an_error():
    with pytest.raises(ValueError, match=r"logprobs.content\[0\]: 6 alternatives came and the client asked for 7"):
        client_reply(answer("u", "x"), Wishes(logprobs=True, top_logprobs=7))


def test_wishes_without_log_probs_want_no_alternatives():
    assert Wishes.of({"top_logprobs": 3}) == Wishes()
    assert Wishes.of({"top_logprobs": 3, "logprobs": True}) == dataclasses.replace(Wishes(), logprobs=True, top_logprobs=3)


def test_without_recording_a_client_gets_as_many_alternatives_as_openai_allows():
    off = ScoreCenteringConfig()
    assert requested({"logprobs": True, "top_logprobs": 20}, off)["top_logprobs"] == 20
    with pytest.raises(ValueError, match="top_logprobs = 21: ask for at most 20"):
        requested({"logprobs": True, "top_logprobs": 21}, off)
