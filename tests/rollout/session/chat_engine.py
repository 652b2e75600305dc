"""A chat engine with a known distribution and scripted words, which answers as SGLang 0.5.23 does."""

import asyncio
import threading

import numpy as np
import orjson
from fastapi import FastAPI, Request, Response

from tests.samples import in_form

VOCAB, EOS, MERGED = 300, 0, 299
FORCED = ("logprobs", "return_meta_info", "return_prompt_token_ids")


def encode(text, *, merge=True):
    """One token a character; in a prompt "ab" is one token, in an answer two: what makes re-tokenised answers differ."""
    ids, place = [], 0
    while place < len(text):
        if merge and text.startswith("ab", place):
            ids.append(MERGED)
            place += 2
        elif text.startswith("<eos>", place):
            ids.append(EOS)
            place += 5
        else:
            ids.append(1 + ord(text[place]))
            place += 1
    return ids


def decode(token):
    return {EOS: "<eos>", MERGED: "ab"}.get(token) or chr(token - 1)


def render(messages):
    """``[role]text`` of every message, the stop left out, and the frame of the next answer."""
    parts = [f"[{message['role']}]{_text(message)}" for message in messages]
    return encode("".join(parts) + "[assistant]")


def log_q(token, place, temperature=1.0):
    """float32 ``[VOCAB]``, the sampler's; a function of the sampled token and its place, so that shifted rows show."""
    logits = 2 * np.random.default_rng([token, place]).standard_normal(VOCAB) / temperature
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


class ChatEngine:
    """Attributes to script it by:

    words: what it says next, by default its last user's words; a dict is a whole message.
    finish: ``stop``, ``length`` or ``abort``; only ``stop`` ends in the stop token.
    spoil: changes an answer before it is sent.
    status: of every answer; other than 200 it says ``refusal``.
    model_path: where it says its model lies.
    original_log_probs: reports log-probs from before the temperature.
    held: while clear, calls wait; an abort of theirs lets them go.
    """

    def __init__(self):
        self.reset()
        self.app = FastAPI()
        self.app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        self.app.add_api_route("/abort_request", self.abort, methods=["POST"])
        self.app.add_api_route("/v1/models", self.models, methods=["GET"])
        self.app.add_api_route("/get_model_info", self.model_info, methods=["GET"])

    def reset(self):
        self.words, self.finish, self.version = [], "stop", "7"
        self.spoil = lambda answer: None
        self.status, self.refusal, self.model_path = 200, "not today", "/nowhere"
        self.original_log_probs = False
        self.held = threading.Event()
        self.held.set()
        self.bodies, self.answers, self.aborted, self.waiting = [], [], [], 0

    @property
    def requests(self):
        return [orjson.loads(body) for body in self.bodies]

    async def chat(self, request: Request):
        body = await request.body()
        self.bodies.append(body)
        asked = orjson.loads(body)
        self.waiting += 1
        while not self.held.is_set() and asked.get("rid") not in self.aborted and not await request.is_disconnected():
            await asyncio.sleep(0.01)
        self.waiting -= 1
        if self.status != 200:
            return Response(self.refusal, self.status)
        if asked.get("stream"):
            return Response(b'data: {"choices": []}\n\ndata: [DONE]\n\n', media_type="text/event-stream")
        answer = self.answer(asked)
        self.spoil(answer)
        self.answers.append(answer)
        return Response(orjson.dumps(answer), media_type="application/json")

    async def abort(self, request: Request):
        self.aborted.append(orjson.loads(await request.body())["rid"])

    async def models(self):
        return {"object": "list", "data": [{"id": "stub", "object": "model", "created": 1, "owned_by": "test"}]}

    async def model_info(self):
        return {"model_path": self.model_path}

    def answer(self, asked):
        words = self.words.pop(0) if self.words else _text(asked["messages"][-1])
        message = words if isinstance(words, dict) else {"role": "assistant", "content": words}
        tokens = encode(_text(message), merge=False) + ([EOS] if self.finish == "stop" else [])
        prompt = asked.get("input_ids") or render(asked["messages"])
        finish = {"type": self.finish} | ({"matched": EOS} if self.finish == "stop" else {})
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.finish}
        if message.get("tool_calls"):
            choice["finish_reason"] = "tool_calls"
        if asked.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = prompt
        meta = {"id": "chat-1", "finish_reason": finish, "completion_tokens": len(tokens), "weight_version": self.version}
        if asked.get("logprobs"):
            temperature = 1.0 if self.original_log_probs else asked.get("temperature") or 1.0
            rows = [log_q(token, place, temperature) for place, token in enumerate(tokens)]
            choice["logprobs"] = {"content": [_content(row, token, asked) for row, token in zip(rows, tokens, strict=True)]}
            meta |= _meta(rows, tokens, asked)
        if asked.get("return_meta_info"):
            choice["meta_info"] = meta
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": len(prompt) + len(tokens)}
        return {
            "id": "chat-1", "object": "chat.completion", "created": 1, "model": "stub", "choices": [choice], "usage": usage
        }  # fmt: skip


def _text(message):
    calls = "".join(f"<{call['function']['name']}>" for call in message.get("tool_calls") or ())
    content = message.get("content") or ""
    return (content if isinstance(content, str) else "".join(part["text"] for part in content)) + calls


def _top(row, count):
    return np.argsort(-row, kind="stable")[:count]


def _content(row, token, asked):
    nested = not asked.get("return_flat_raw_output_top_logprobs")
    alternatives = _top(row, asked.get("top_logprobs") or 0) if nested else ()
    top = [{"token": decode(i), "logprob": float(row[i])} for i in alternatives]
    return {"token": decode(token), "logprob": float(row[token]), "top_logprobs": top}


def _meta(rows, tokens, asked):
    meta = {"output_token_logprobs": [[float(row[t]), t, decode(t)] for row, t in zip(rows, tokens, strict=True)]}
    if asked.get("return_sampling_mask"):
        kept = [sorted({*_top(row, asked["top_k"] - 1).tolist(), t}) for row, t in zip(rows, tokens, strict=True)]
        meta["output_token_sampling_mask"] = kept
        meta["output_token_sampling_logprobs"] = [_log_softmax(row[ids]).tolist() for row, ids in zip(rows, kept, strict=True)]
    elif count := asked.get("top_logprobs"):
        meta["output_top_logprobs"] = [[[float(row[i]), int(i), decode(i)] for i in _top(row, count)] for row in rows]
        if tokens and asked.get("return_flat_raw_output_top_logprobs"):
            return in_form(meta, "b64")
    return meta


def _log_softmax(values):
    values = values.astype(np.float64)
    return values - np.log(np.exp(values).sum())
