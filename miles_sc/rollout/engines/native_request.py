"""One body of SGLang's native ``/generate``, read strictly: what it says is done, or it is refused by name."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

REQUEST_FIELDS = frozenset(
    {
        "input_ids",
        "sampling_params",
        "return_logprob",
        "top_logprobs_num",
        "return_flat_raw_output_top_logprobs",
        "return_flat_raw_top_logprobs_b64",
        "return_sampling_mask",
        "sampling_logprobs_mode",
    }
)
SAMPLING_FIELDS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "max_new_tokens", "ignore_eos", "stop_token_ids", "sampling_seed"}
)
SAMPLING_LOGPROBS_MODES = ("selected", "support")
SAMPLING_MASK_MAX_TOKENS = 4096
DEFAULT_MAX_NEW_TOKENS = 128
SMALLEST_TEMPERATURE = 1e-6

_KINDS = {"integer": numbers.Integral, "number": numbers.Real, "boolean": bool}


@dataclass(frozen=True)
class ModelLimits:
    """What a request is held against. ``max_positions`` is None where the model states no limit."""

    vocab_size: int
    max_positions: int | None
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class NativeRequest:
    """A checked request with every default written out.

    Temperature 0 is held as temperature 1 with ``top_k`` 1, as SGLang does: greedy, log-probs at temperature 1.
    ``top_k`` is at most the vocabulary, which is "no filter". ``stop_token_ids`` is empty under ``ignore_eos``.
    """

    input_ids: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling_seed: int | None
    return_logprob: bool
    top_logprobs_num: int
    flat: bool
    base64: bool
    sampling_mask: bool
    sampling_logprobs_mode: str
    from_support: bool
    """Whether tokens are drawn from the filtered support (a filter is set or the mask is asked for)."""


def parse_request(body: Mapping[str, Any], limits: ModelLimits, *, place: str) -> NativeRequest:
    """Reads one body; a null counts as absent, as on the server.

    Args:
        body: the JSON body of a native ``/generate`` call with one prompt.
        limits: the model's.
        place: says in errors which request it was.

    Raises:
        ValueError: an unknown field, a wrong type, a value outside its range, or fields that contradict each other. The
            message holds the place, the field, its value and what to do.
    """
    _refuse_unknown(body, REQUEST_FIELDS, place=place, prefix="")
    params = body.get("sampling_params")
    params = {} if params is None else params
    if not isinstance(params, Mapping):
        raise ValueError(f"{place}: sampling_params={params!r} must be one object; send one prompt per request")
    _refuse_unknown(params, SAMPLING_FIELDS, place=place, prefix="sampling_params.")

    input_ids = _read_token_ids(body.get("input_ids"), "input_ids", limits.vocab_size, place=place)
    if not input_ids:
        raise ValueError(f"{place}: input_ids is empty; send at least one prompt token")
    greedy, temperature = _read_temperature(params, place=place)
    top_p, top_k = _read_filters(params, place=place)
    recording = _read_recording(body, limits.vocab_size, place=place)
    if recording["sampling_mask"]:
        _check_mask_bound(1 if greedy else top_k, place=place)
    top_k = 1 if greedy else min(top_k or limits.vocab_size, limits.vocab_size)
    return NativeRequest(
        input_ids=input_ids,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=_read_max_new_tokens(params, len(input_ids), limits, place=place),
        stop_token_ids=_read_stop_token_ids(params, limits, place=place),
        sampling_seed=_read_sampling_seed(params, place=place),
        from_support=recording["sampling_mask"] or top_k < limits.vocab_size or top_p < 1.0,
        **recording,
    )


def _refuse_unknown(fields: Mapping[str, Any], known: frozenset[str], *, place: str, prefix: str) -> None:
    unknown = sorted(str(name) for name in fields if name not in known)
    if unknown:
        named = ", ".join(prefix + name for name in unknown)
        raise ValueError(
            f"{place}: {named} not supported by the embedded engine, which ignores nothing; remove it "
            f"(supported: {', '.join(sorted(known))})"
        )


def _read(fields: Mapping[str, Any], name: str, kind: str, default: Any, *, place: str) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, _KINDS[kind]) or (kind != "boolean" and isinstance(value, bool)):
        raise ValueError(f"{place}: {name}={value!r} is a {type(value).__name__}; send a JSON {kind}")
    return value


def _read_token_ids(value: Any, name: str, vocab_size: int, *, place: str) -> tuple[int, ...]:
    try:
        ids = np.asarray([] if value is None else value)
    except ValueError:
        raise ValueError(f"{place}: {name} is ragged; send one flat list of token ids per request") from None
    if ids.size == 0:
        return ()
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{place}: {name} has shape {list(ids.shape)} and dtype {ids.dtype}; send one flat list of integers")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        raise ValueError(
            f"{place}: {name}[{at}]={ids[at]} is outside the vocabulary [0, {vocab_size}); tokenize with this model's tokenizer"
        )
    return tuple(ids.tolist())


def _read_temperature(params: Mapping[str, Any], *, place: str) -> tuple[bool, float]:
    temperature = float(_read(params, "temperature", "number", 1.0, place=place))
    if temperature == 0.0:
        return True, 1.0
    if not math.isfinite(temperature) or temperature < SMALLEST_TEMPERATURE:
        raise ValueError(
            f"{place}: temperature={temperature!r} is neither 0 (greedy) nor finite and at least "
            f"{SMALLEST_TEMPERATURE}; set one of these"
        )
    return False, temperature


def _read_filters(params: Mapping[str, Any], *, place: str) -> tuple[float, int | None]:
    top_p = float(_read(params, "top_p", "number", 1.0, place=place))
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"{place}: top_p={top_p!r} is outside (0, 1]; set 1.0 for no filter")
    top_k = int(_read(params, "top_k", "integer", -1, place=place))
    if top_k == 0 or top_k < -1:
        raise ValueError(f"{place}: top_k={top_k} is neither -1 (no filter) nor positive; set one of these")
    min_p = float(_read(params, "min_p", "number", 0.0, place=place))
    if min_p != 0.0:
        raise ValueError(f"{place}: min_p={min_p!r} is not supported by the embedded engine; set 0, use top_k, top_p")
    return top_p, top_k if top_k > 0 else None


def _read_recording(body: Mapping[str, Any], vocab_size: int, *, place: str) -> dict[str, Any]:
    return_logprob = _read(body, "return_logprob", "boolean", False, place=place)
    count = int(_read(body, "top_logprobs_num", "integer", 0, place=place))
    flat = _read(body, "return_flat_raw_output_top_logprobs", "boolean", False, place=place)
    base64 = _read(body, "return_flat_raw_top_logprobs_b64", "boolean", False, place=place)
    mask = _read(body, "return_sampling_mask", "boolean", False, place=place)
    mode = body.get("sampling_logprobs_mode")
    if not 0 <= count <= vocab_size:
        raise ValueError(
            f"{place}: top_logprobs_num={count} is outside [0, {vocab_size}], the vocabulary; ask for no more than "
            "that (an SGLang server stops on a larger one)"
        )
    if count and not return_logprob:
        raise ValueError(f"{place}: top_logprobs_num={count} without return_logprob; set return_logprob to true")
    if flat and not count:
        raise ValueError(f"{place}: return_flat_raw_output_top_logprobs without top_logprobs_num; set a positive one")
    if base64 and not flat:
        raise ValueError(
            f"{place}: return_flat_raw_top_logprobs_b64 without return_flat_raw_output_top_logprobs; set both or none"
        )
    if mode is not None and mode not in SAMPLING_LOGPROBS_MODES:
        raise ValueError(f"{place}: sampling_logprobs_mode={mode!r} is not one of {', '.join(SAMPLING_LOGPROBS_MODES)}")
    if mode is not None and not mask:
        raise ValueError(
            f"{place}: sampling_logprobs_mode={mode!r} can only be set when return_sampling_mask is true; set it, or "
            "remove the mode"
        )
    return {
        "return_logprob": return_logprob,
        "top_logprobs_num": count,
        "flat": flat,
        "base64": base64,
        "sampling_mask": mask,
        "sampling_logprobs_mode": mode or "selected",
    }


def _check_mask_bound(top_k: int | None, *, place: str) -> None:
    if top_k is None or top_k > SAMPLING_MASK_MAX_TOKENS:
        asked = "no top_k (-1)" if top_k is None else f"top_k={top_k}"
        raise ValueError(
            f"{place}: return_sampling_mask with {asked} does not bound the support; set top_k in [1, {SAMPLING_MASK_MAX_TOKENS}]"
        )


def _read_max_new_tokens(params: Mapping[str, Any], prompt_tokens: int, limits: ModelLimits, *, place: str) -> int:
    count = int(_read(params, "max_new_tokens", "integer", DEFAULT_MAX_NEW_TOKENS, place=place))
    if count < 0:
        raise ValueError(f"{place}: max_new_tokens={count} is negative; set 0 or more")
    if limits.max_positions is not None and prompt_tokens + count > limits.max_positions:
        raise ValueError(
            f"{place}: {prompt_tokens} prompt tokens and max_new_tokens={count} pass the model's "
            f"max_position_embeddings={limits.max_positions}; shorten the prompt or set max_new_tokens to at most "
            f"{max(limits.max_positions - prompt_tokens, 0)}"
        )
    return count


def _read_stop_token_ids(params: Mapping[str, Any], limits: ModelLimits, *, place: str) -> tuple[int, ...]:
    own = _read_token_ids(params.get("stop_token_ids"), "stop_token_ids", limits.vocab_size, place=place)
    # As on the server, ignore_eos switches off every stop token, the request's own among them.
    if _read(params, "ignore_eos", "boolean", False, place=place):
        return ()
    return tuple(sorted({*limits.stop_token_ids, *own}))


def _read_sampling_seed(params: Mapping[str, Any], *, place: str) -> int | None:
    seed = _read(params, "sampling_seed", "integer", None, place=place)
    if seed is not None and seed < 0:
        raise ValueError(f"{place}: sampling_seed={seed} is negative; set 0 or more")
    return None if seed is None else int(seed)
