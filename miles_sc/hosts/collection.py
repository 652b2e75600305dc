"""A host's generation calls: what they ask the engine for, and the rows that its answers bring."""

import argparse
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from miles_sc.config import ScoreCenteringConfig
from miles_sc.hosts.run import bound, producer_vocabulary, recording
from miles_sc.rollout.answer import GeneratedTokens, check_likeliest, meta_info_of, read_generated_tokens
from miles_sc.rollout.recorded_rows import extended_rows
from miles_sc.rollout.request import configure_request

# Hosts tell their generate functions whether they evaluate, and those do not tell the functions that ask the engine.
EVALUATING: ContextVar[bool] = ContextVar("miles_sc_evaluating", default=False)
_CALL: ContextVar["_Call | None"] = ContextVar("miles_sc_call", default=None)


async def generate_and_reward(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around a host's generation of one sample: remembers whether it evaluates, where that makes a difference."""
    call = bound(wrapped, args, kwargs)
    run = call["args"] if "args" in call else call["state"].args
    if recording(run) is None:
        return await wrapped(*args, **kwargs)
    token = EVALUATING.set(bool(call["evaluation"]))
    try:
        return await wrapped(*args, **kwargs)
    finally:
        EVALUATING.reset(token)


# --- native calls whose request and answer pass through functions of their own


def request_payload(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around the function that builds a native request: ``(payload or None, status)``."""
    payload, status = wrapped(*args, **kwargs)
    run = bound(wrapped, args, kwargs)["args"]
    config = recording(run)
    if payload is None or config is None or EVALUATING.get():
        return payload, status
    return configured(run, config, payload), status


async def sample_update(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around the function that appends a native answer to a sample. The answer is read first: a bad one appends nothing."""
    call = bound(wrapped, args, kwargs)
    config = recording(call["args"])
    if config is None or not asks_for_rows(config, call["payload"]):
        return await wrapped(*args, **kwargs)
    rows = PendingRows(call["args"], config, call["sample"], meta_info_of(call["output"]))
    result = await wrapped(*args, **kwargs)
    rows.put(call["sample"])
    return result


# --- the older generate function, which does everything itself


class _Call:
    """One call of it: its request is configured, and its answer read, on the way through ``post``."""

    def __init__(self, run: argparse.Namespace, config: ScoreCenteringConfig, sample: Any) -> None:
        self.run, self.config, self.sample = run, config, sample
        self.rows: PendingRows | None = None


async def whole_generate(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``generate(args, sample, sampling_params)``."""
    given = bound(wrapped, args, kwargs)
    config = recording(given["args"])
    if config is None or EVALUATING.get():
        return await wrapped(*args, **kwargs)
    call = _Call(given["args"], config, given["sample"])
    token = _CALL.set(call)
    try:
        sample = await wrapped(*args, **kwargs)
    finally:
        _CALL.reset(token)
    if call.rows is not None:
        call.rows.put(sample)
    return sample


async def generate_post(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``post(url, payload, ...)`` where that function sees it."""
    call = _CALL.get()
    if call is None:
        return await wrapped(*args, **kwargs)
    asked = bound(wrapped, args, kwargs)
    if not asked["url"].endswith("/generate"):
        return await wrapped(*args, **kwargs)
    output = await wrapped(**{**asked, "payload": configured(call.run, call.config, asked["payload"])})
    call.rows = PendingRows(call.run, call.config, call.sample, meta_info_of(output))
    return output


# --- what all of them share


def configured(
    run: argparse.Namespace, config: ScoreCenteringConfig, request: Mapping[str, Any], *, openai: bool = False
) -> dict[str, Any]:
    """A host's request, recording. The adapter that the run itself trains is its policy, and stays."""
    trains_adapter = getattr(run, "lora_rank", 0) > 0 or getattr(run, "lora_adapter_path", None) is not None
    adapter = request.get("lora_path") if trains_adapter else None
    if adapter is None:
        return configure_request(config, request, openai=openai)
    without = {name: value for name, value in request.items() if name != "lora_path"}
    return configure_request(config, without, openai=openai) | {"lora_path": adapter}


def asks_for_rows(config: ScoreCenteringConfig, request: Mapping[str, Any], *, openai: bool = False) -> bool:
    """Whether a request is one that :func:`configured` made; evaluation's are not."""
    if config.mode == "support":
        return request.get("sampling_logprobs_mode") == "support"
    return request.get("top_logprobs" if openai else "top_logprobs_num") == config.top_logprobs_num


def read_engine(run: argparse.Namespace, config: ScoreCenteringConfig, meta_info: Mapping[str, Any]) -> GeneratedTokens:
    """What an engine of the run generated in one call, validated as an engine's own."""
    vocab_size = producer_vocabulary(run)
    generated = read_generated_tokens(meta_info, k=config.top_logprobs_num, mode=config.mode, vocab_size=vocab_size)
    check_likeliest(generated)
    return generated


class PendingRows:
    """The rows of an answer, read and validated, that a sample gets once the host has appended the answer's tokens."""

    def __init__(self, run: argparse.Namespace, config: ScoreCenteringConfig, sample: Any, meta_info: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: what :func:`~miles_sc.rollout.append_candidates` refuses; the sample is not touched.
        """
        self._generated = read_engine(run, config, meta_info)
        self._rows = extended_rows(sample, self._generated)

    def put(self, sample: Any) -> None:
        """
        Raises:
            ValueError: the host has appended something else than the answer's tokens.
        """
        added = len(self._generated)
        appended = list(sample.tokens[len(sample.tokens) - added :])
        if sample.response_length != len(self._rows) or appended != self._generated.token_ids.tolist():
            raise ValueError(
                f"sample {getattr(sample, 'index', None)}: the host has {sample.response_length} response tokens where the "
                f"answers recorded {len(self._rows)}, or other ones: a generate function of your own must append exactly what "
                "the engine returns"
            )
        self._rows.put(sample)
        if self._rows.support is not None and added:
            # the host has taken the log-probs of the whole vocabulary; the token was drawn from its support
            sample.rollout_log_probs = [*sample.rollout_log_probs[:-added], *self._generated.log_probs.tolist()]
