"""Miles's session server, v1 and v2: what it asks of the engine, tells its client, assembles and sends."""

import copy
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import orjson

from miles_sc.hosts.collection import EVALUATING, asks_for_rows, configured, read_engine
from miles_sc.hosts.run import bound, recording
from miles_sc.rollout.answer_fields import CANDIDATE_FIELDS
from miles_sc.rollout.recorded_rows import FIELDS, RecordedRows
from miles_sc.rollout.session.proxy import Wishes, with_token_texts
from miles_sc.sampling_support import SamplingSupport

_IDS, _LOG_PROBS, _SUPPORT = FIELDS
# How the arrays travel beside the fields that Miles knows: name, type.
WIRE = {_IDS: np.int32, _LOG_PROBS: np.float32, f"{_SUPPORT}_ids": np.int32, f"{_SUPPORT}_offsets": np.int64}
# Alternatives per token that the client of the call in hand asked for; None while its call is not recorded.
_ALTERNATIVES: ContextVar[int | None] = ContextVar("miles_sc_alternatives", default=None)


# --- whether a session evaluates: its opener says so, the server remembers


async def opening_post(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``post(url, payload, ...)`` where the client of the session server sees it."""
    call = bound(wrapped, args, kwargs)
    if EVALUATING.get() and call["url"].endswith("/sessions"):
        return await wrapped(**{**call, "payload": {**call["payload"], "evaluation": True}})
    return await wrapped(*args, **kwargs)


def session_routes(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``setup_session_routes(app, backend, args)``: its route that opens a session does not read what is sent there."""
    result = wrapped(*args, **kwargs)
    call = bound(wrapped, args, kwargs)
    if recording(call["args"]) is not None:
        call["app"].add_middleware(_OpeningReader)
    return result


class _OpeningReader:
    """ASGI middleware: reads ``{"evaluation": true}`` of ``POST /sessions`` and passes the body on."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] != "/sessions":
            return await self._app(scope, receive, send)
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        try:
            asked = orjson.loads(body) if body else {}
        except orjson.JSONDecodeError:
            asked = {}  # the host has never minded
        EVALUATING.set(isinstance(asked, dict) and asked.get("evaluation") is True)
        replayed = iter(messages)

        async def replay() -> Any:
            return next(replayed, None) or await receive()

        await self._app(scope, replay, send)


def create_session(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``SessionRegistry.create_session()``."""
    session_id = wrapped(*args, **kwargs)
    instance.sessions[session_id].miles_sc_evaluating = EVALUATING.get()
    return session_id


async def chat_completions(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``chat_completions(session_id, ...)``."""
    session = instance.registry.sessions.get(bound(wrapped, args, kwargs)["session_id"])
    tokens = EVALUATING.set(getattr(session, "miles_sc_evaluating", False)), _ALTERNATIVES.set(None)
    try:
        return await wrapped(*args, **kwargs)
    finally:
        EVALUATING.reset(tokens[0])
        _ALTERNATIVES.reset(tokens[1])


# --- one call


def prepare_chat_request(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``prepare_chat_request(body, args, tito_tokenizer)``."""
    request, stream, tokenizer = wrapped(*args, **kwargs)
    run = bound(wrapped, args, kwargs)["args"]
    config = recording(run)
    if config is None or EVALUATING.get():
        return request, stream, tokenizer
    refusal = wrapped.__globals__["MessageValidationError"]
    try:
        wishes = Wishes.of(request)
        recorded = configured(run, config, request, openai=True)
        if wishes.top_logprobs:
            recorded = with_token_texts(config, recorded, wishes)
    except ValueError as error:
        raise refusal(str(error)) from error
    _ALTERNATIVES.set(wishes.top_logprobs)
    return recorded, stream, tokenizer


def client_response(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``_strip_replay_payloads(response)``: the client is told what it would have been told without us."""
    told = wrapped(*args, **kwargs)
    alternatives = _ALTERNATIVES.get()
    return told if alternatives is None else {**told, "choices": [_as_asked(choice, alternatives) for choice in told["choices"]]}


def _as_asked(choice: Mapping[str, Any], alternatives: int) -> dict[str, Any]:
    choice = dict(choice)
    if isinstance(choice.get("meta_info"), Mapping):
        kept = {name: value for name, value in choice["meta_info"].items() if not name.startswith(CANDIDATE_FIELDS)}
        choice["meta_info"] = kept
    if isinstance(choice.get("logprobs"), Mapping) and choice["logprobs"].get("content"):
        tokens = [
            {**token, "top_logprobs": (token.get("top_logprobs") or [])[:alternatives]} for token in choice["logprobs"]["content"]
        ]
        choice["logprobs"] = {**choice["logprobs"], "content": tokens}
    return choice


# --- a session's samples


def sample_of_record(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``_compute_sample_from_openai_record(args, record, tokenizer, trim_count)``."""
    sample = wrapped(*args, **kwargs)
    call = bound(wrapped, args, kwargs)
    config = recording(call["args"])
    if config is None or not asks_for_rows(config, call["record"].request, openai=True):
        return sample
    generated = read_engine(call["args"], config, call["record"].response["choices"][0]["meta_info"])
    rows = RecordedRows(generated.candidates, generated.support).trim(call["trim_count"])
    if len(rows) != sample.response_length:
        raise ValueError(f"a turn of {sample.response_length} tokens has {len(rows)} recorded rows: every token needs one")
    rows.put(sample)
    if rows.support is not None:
        sample.rollout_log_probs = generated.log_probs[: len(rows)].tolist()
    return sample


def wire_fields(known: Mapping[str, Any]) -> dict[str, Any]:
    """Miles's table of what crosses the wire, with our arrays; only the fields that a call names do cross."""
    spec = type(next(iter(known.values())))
    return {**known, **{name: spec("tensor", np.dtype(dtype), strict=True) for name, dtype in WIRE.items()}}


def wire_tensors(known: frozenset[str]) -> frozenset[str]:
    """The names in that table that may be null."""
    return known | set(WIRE)


def encode_samples(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Around ``encode_samples(samples, ..., *, fields)``; samples without recorded rows are written as ever."""
    call = bound(wrapped, args, kwargs)
    if all(RecordedRows.of(sample) is None for sample in call["samples"]):
        return wrapped(*args, **kwargs)
    call["samples"] = [_for_the_wire(sample) for sample in call["samples"]]
    call["fields"] = (*call["fields"], *WIRE)
    return wrapped(**call)


def _for_the_wire(sample: Any) -> Any:
    """The candidates are fields of it already; a support travels as its two arrays."""
    written, support = copy.copy(sample), sample.rollout_sampling_mask
    written.rollout_sampling_mask_ids = None if support is None else support.ids
    written.rollout_sampling_mask_offsets = None if support is None else support.offsets
    return written


def decode_samples(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``decode_samples_and_merge_input_sample(payload, input_sample, *, fields)``."""
    call = bound(wrapped, args, kwargs)
    if not any(name.startswith(f"{_IDS}.") for name in _tensor_names(call["payload"])):
        return wrapped(*args, **kwargs)
    call["fields"] = (*call["fields"], *WIRE)
    reply = wrapped(**call)
    for sample in reply.samples:
        ids, offsets = (sample.__dict__.pop(f"{_SUPPORT}_{part}") for part in ("ids", "offsets"))
        sample.rollout_sampling_mask = None if ids is None else SamplingSupport(ids, offsets)
    return reply


def _tensor_names(payload: bytes) -> list[str]:
    """From the header of a safetensors body: its length in 8 bytes, then JSON. What is none is for the host to refuse."""
    length = int.from_bytes(payload[:8], "little")
    try:
        return list(orjson.loads(payload[8 : 8 + length]))
    except orjson.JSONDecodeError:
        return []
