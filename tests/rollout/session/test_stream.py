"""A whole answer as server-sent events, chunk by chunk."""

import orjson
import pytest

from miles_sc.rollout.session.stream import event_stream

REPLY = {
    "id": "a", "object": "chat.completion", "created": 1, "model": "m", "usage": {"total_tokens": 3}, "metadata": {"w": "7"},
    "choices": [{
        "index": 0, "finish_reason": "tool_calls", "matched_stop": 5, "logprobs": {"content": [1]},
        "message": {
            "role": "assistant", "content": "hi", "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}, {"id": "d"}],
        },
    }],
}  # fmt: skip


@pytest.mark.parametrize("usage", [False, True])
def test_every_chunk(usage):
    *events, last, end = event_stream(REPLY, usage=usage).split(b"\n\n")
    assert (last, end) == (b"data: [DONE]", b"")
    chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
    shared = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m", "metadata": {"w": "7"}}
    shared |= {"usage": None} if usage else {}
    calls = [{"id": "c", "function": {"name": "f", "arguments": "{}"}, "index": 0}, {"id": "d", "index": 1}]
    choices = [
        {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        {
            "delta": {"content": "hi", "reasoning_content": "hm", "tool_calls": calls},
            "logprobs": {"content": [1]},
            "finish_reason": None,
        },
        {"delta": {}, "logprobs": None, "finish_reason": "tool_calls", "matched_stop": 5},
    ]
    told = [shared | {"choices": [{"index": 0} | choice]} for choice in choices]
    assert chunks == told + ([shared | {"choices": [], "usage": {"total_tokens": 3}}] if usage else [])
