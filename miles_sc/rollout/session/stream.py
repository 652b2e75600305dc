"""A whole chat completion told as the server-sent events of a streamed one."""

from collections.abc import Iterator
from typing import Any

import orjson


def event_stream(reply: dict[str, Any], *, usage: bool) -> bytes:
    """Role, message, finish reason, usage if asked for, ``[DONE]``.

    Args:
        reply: a chat completion with one choice, as its client would see it.
        usage: whether its client asked for ``stream_options.include_usage``.
    """
    shared = {name: value for name, value in reply.items() if name not in ("choices", "usage")}
    shared["object"] = "chat.completion.chunk"
    chunks = [shared | {"choices": [choice]} | ({"usage": None} if usage else {}) for choice in _choices(reply["choices"][0])]
    if usage:
        chunks.append(shared | {"choices": [], "usage": reply.get("usage")})
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def _choices(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    message = {name: value for name, value in choice["message"].items() if name != "role"}
    if message.get("tool_calls"):
        message["tool_calls"] = [call | {"index": place} for place, call in enumerate(message["tool_calls"])]
    last = {name: value for name, value in choice.items() if name not in ("index", "message", "logprobs")}
    for delta, rest in (
        ({"role": choice["message"].get("role", "assistant"), "content": ""}, {"logprobs": None, "finish_reason": None}),
        (message, {"logprobs": choice.get("logprobs"), "finish_reason": None}),
        ({}, {"logprobs": None} | last),
    ):
        yield {"index": choice.get("index", 0), "delta": delta} | rest
