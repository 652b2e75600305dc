"""One call's answer, parsed and validated: sampled tokens, candidates and support, nested or flat (CONTRACT 6)."""

import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_sc.candidates import LOG_PROB_SLACK, MINUS_INFINITY, Candidates
from miles_sc.sampling_support import SamplingSupport

_ROUTE = (
    "the route between trainer and engine may cap or drop candidates (a router that allows 20 on chat, a layer that does not "
    "know the field, entries merged by token text); ask the engine directly or update that layer"
)


@dataclass(frozen=True)
class GeneratedTokens:
    """What one call generated, validated: n tokens with their rows.

    Attributes:
        token_ids: int64 ``[n]``.
        log_probs: float64 ``[n]``, log q of the sampled token; over the support where sampling was filtered.
        candidates: ``[n, K]``; None where none are recorded (K = 0).
        support: under filtered sampling.
        weight_versions: n names of the weights that sampled each token, "" where the engine names none.
        finish_reason: ``stop``, ``length``, ``abort`` or what else the engine says; "" if it says nothing.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    candidates: Candidates | None
    support: SamplingSupport | None
    weight_versions: list[str]
    finish_reason: str

    def __len__(self) -> int:
        return self.token_ids.size


def read_generated_tokens(
    meta_info: Mapping[str, Any], *, k: int, mode: str = "selected", vocab_size: int | None = None
) -> GeneratedTokens:
    """Parses and validates one answer's ``meta_info``, native or a chat choice's.

    Args:
        k: candidates asked for, the width of the arrays; 0 reads the sampled tokens alone.
        mode: ``selected`` (top k of the whole vocabulary) or ``support`` (everything filtered sampling could draw).
        vocab_size: the producer's; bounds the ids, and the rows where it is smaller than k.

    Raises:
        ValueError: anything missing, short, long, misaligned or not a distribution.
    """
    if mode not in ("selected", "support"):
        raise ValueError(f"mode = {mode!r}: choose selected or support")
    if k < 0:
        raise ValueError(f"k = {k}: give a number of candidates, or 0 for none")
    token_ids, log_probs = _sampled_tokens(meta_info)
    rows, candidates, support = token_ids.size, None, None
    if k and rows == 0:
        # nothing was generated: the fields may be absent, or hold a stray row (SGLang 0.5.23 for max_new_tokens=0)
        candidates = Candidates.gap(0, k)
        support = SamplingSupport.empty() if mode == "support" else None
    elif k and mode == "support":
        candidates, support = _support_candidates(meta_info, rows, k)
        log_probs = _log_probs_within_support(candidates, token_ids)
    elif k:
        candidates = _selected_candidates(meta_info, rows, k, vocab_size)
    _check_sampled(token_ids, log_probs, vocab_size)
    if candidates is not None:
        candidates.validate(
            vocab_size=vocab_size, sampled_token_ids=token_ids, sampled_log_probs=log_probs, complete=mode == "support"
        )
    finish_reason = meta_info.get("finish_reason") or ""
    if isinstance(finish_reason, Mapping):
        finish_reason = finish_reason.get("type") or ""
    versions = _weight_versions(meta_info, rows)
    return GeneratedTokens(token_ids, log_probs, candidates, support, versions, str(finish_reason))


def _weight_versions(meta_info: Mapping[str, Any], rows: int) -> list[str]:
    """The weights that sampled each of the call's tokens; they may have changed on the way."""
    spans = meta_info.get("weight_versions")
    if spans is None:
        return [meta_info.get("weight_version") or ""] * rows
    try:
        versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    except (TypeError, LookupError) as error:
        raise ValueError(f"weight_versions = {spans!r}: wanted a list of spans with version, start and end") from error
    if len(versions) != rows:
        raise ValueError(f"weight_versions = {spans} for {rows} generated tokens: every token was sampled by one version")
    return versions


def _sampled_tokens(meta_info: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    field = "output_token_logprobs"
    entries = meta_info.get(field)
    if entries is None and meta_info.get("completion_tokens") != 0:
        raise ValueError(
            f"{field} is missing from meta_info: ask with return_logprob (native) or logprobs and return_meta_info (chat)"
        )
    entries = entries or ()
    values = _numbers(_column(entries, 0, field), field)
    ids = _numbers(_column(entries, 1, field), field, integers=True)
    if (generated := meta_info.get("completion_tokens")) is not None and generated != ids.size:
        raise ValueError(f"{field} has {ids.size} rows for {generated} generated tokens: every token needs exactly one")
    return ids, values


def _check_sampled(token_ids: np.ndarray, log_probs: np.ndarray, vocab_size: int | None) -> None:
    for broken, what in (
        (~np.isfinite(log_probs), "is not finite"),
        (log_probs <= MINUS_INFINITY, "stands for -inf, and what was sampled had a probability"),
        (log_probs > LOG_PROB_SLACK, "is above 0, so it is no log-prob"),
    ):
        if broken.any():
            row = int(np.argmax(broken))
            raise ValueError(f"output_token_logprobs, row {row}: log-prob {log_probs[row]} of token {token_ids[row]} {what}")
    outside = (token_ids < 0) | (token_ids >= (np.inf if vocab_size is None else vocab_size))
    if outside.any():
        row = int(np.argmax(outside))
        raise ValueError(f"output_token_logprobs, row {row}: token {token_ids[row]} is outside the vocabulary of {vocab_size}")


def _selected_candidates(meta_info: Mapping[str, Any], rows: int, k: int, vocab_size: int | None) -> Candidates:
    width = k if vocab_size is None else min(k, vocab_size)
    if meta_info.get("output_top_logprobs_shape") is not None:
        log_probs, token_ids = _flat_top_logprobs(meta_info, rows, width)
    else:
        log_probs, token_ids = _nested_top_logprobs(meta_info, rows, width)
    if width == k:
        return Candidates(token_ids, log_probs)
    padded = Candidates.gap(rows, k)
    padded.token_ids[:, :width], padded.log_probs[:, :width] = token_ids, log_probs
    return padded


def _nested_top_logprobs(meta_info: Mapping[str, Any], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    field = "output_top_logprobs"
    table = meta_info.get(field)
    if table is None:
        raise ValueError(f"{field} is missing: {width} candidates were asked for and none came; {_ROUTE}")
    _check_row_count(field, len(table), rows)
    for row, entries in enumerate(table):
        came = len(entries) if isinstance(entries, Sequence) else 0
        if came != width:
            raise ValueError(f"{field}, row {row}: {came} candidates came and {width} were asked for; {_ROUTE}")
    values = _numbers([_column(entries, 0, field, row) for row, entries in enumerate(table)], field)
    ids = _numbers([_column(entries, 1, field, row) for row, entries in enumerate(table)], field, integers=True)
    return values.astype(np.float32), _as_int32(ids, field)


def _flat_top_logprobs(meta_info: Mapping[str, Any], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    shape = meta_info["output_top_logprobs_shape"]
    if not (isinstance(shape, Sequence) and len(shape) == 2 and all(isinstance(size, int) and size >= 0 for size in shape)):
        raise ValueError(f"output_top_logprobs_shape = {shape!r}: wanted [tokens, candidates]")
    prefix = meta_info.get("output_top_logprobs_null_prefix") or 0
    if prefix:
        raise ValueError(f"output_top_logprobs_null_prefix = {prefix}: a generated token without candidates cannot be trained on")
    _check_row_count("output_top_logprobs_shape", shape[0], rows)
    if shape[1] != width:
        raise ValueError(f"output_top_logprobs_shape = {shape}: {shape[1]} candidates came and {width} were asked for; {_ROUTE}")
    log_probs = _flat_array(meta_info, "output_top_logprobs_val_flat", np.float32, shape)
    token_ids = _flat_array(meta_info, "output_top_logprobs_idx_flat", np.int32, shape)
    return log_probs, token_ids


def _flat_array(meta_info: Mapping[str, Any], field: str, dtype: type, shape: Sequence[int]) -> np.ndarray:
    encoded = meta_info.get(f"{field}_b64")
    if encoded is None:
        if meta_info.get(field) is None:
            raise ValueError(f"neither {field} nor {field}_b64 came with output_top_logprobs_shape {shape}; {_ROUTE}")
        integers = dtype is np.int32
        flat = _numbers(meta_info[field], field, integers=integers, row_of=lambda place: place // shape[1])
        flat = _as_int32(flat, field) if integers else flat.astype(dtype)
    else:
        declared = meta_info.get(f"{field}_b64_dtype", np.dtype(dtype).name)
        if declared != np.dtype(dtype).name:
            raise ValueError(f"{field}_b64_dtype = {declared!r}: only {np.dtype(dtype).name} is read")
        try:
            raw = binascii.a2b_base64(encoded, strict_mode=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError(f"{field}_b64 is not base64 ({error}): was the answer truncated?") from error
        if len(raw) % np.dtype(dtype).itemsize:
            raise ValueError(f"{field}_b64 holds {len(raw)} bytes, no whole number of {np.dtype(dtype).name}: was it truncated?")
        flat = np.frombuffer(raw, np.dtype(dtype).newbyteorder("<"))
    if flat.size != shape[0] * shape[1]:
        raise ValueError(f"{field} holds {flat.size} numbers and output_top_logprobs_shape says {list(shape)}: was it truncated?")
    return flat.reshape(shape)


def _support_candidates(meta_info: Mapping[str, Any], rows: int, k: int) -> tuple[Candidates, SamplingSupport]:
    ids_field, values_field = "output_token_sampling_mask", "output_token_sampling_logprobs"
    id_rows, value_rows = meta_info.get(ids_field), meta_info.get(values_field)
    for field, table in ((ids_field, id_rows), (values_field, value_rows)):
        if table is None:
            raise ValueError(f"{field} is missing from an answer to filtered sampling; {_ROUTE}")
        _check_row_count(field, len(table), rows)
    for row, (ids, values) in enumerate(zip(id_rows, value_rows, strict=True)):
        if not isinstance(ids, Sequence):
            raise ValueError(f"{ids_field}, row {row}: {ids!r} in place of a list of ids")
        if not isinstance(values, Sequence) or len(ids) != len(values):
            raise ValueError(
                f"{values_field}, row {row}: its log-probs do not match the {len(ids)} ids of {ids_field}; ask for support mode"
            )
        if len(ids) > k:
            raise ValueError(
                f"{ids_field}, row {row}: the sampling support exceeds the arrays, {len(ids)} ids for {k} slots; raise "
                f"--rollout-top-logprobs-num to at least {len(ids)}"
            )
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in id_rows])]).astype(np.int64)

    def row_of(place: int) -> int:
        return int(np.searchsorted(offsets, place, side="right")) - 1

    flat_ids = _numbers([token for ids in id_rows for token in ids], ids_field, integers=True, row_of=row_of)
    flat_values = _numbers([value for values in value_rows for value in values], values_field, row_of=row_of)
    support = SamplingSupport(_as_int32(flat_ids, ids_field), offsets)
    token_ids = support.padded(k)
    log_probs = np.full((rows, k), -np.inf, np.float32)
    log_probs[np.arange(k) < support.lengths[:, None]] = flat_values
    return Candidates(token_ids, log_probs), support


def _log_probs_within_support(candidates: Candidates, token_ids: np.ndarray) -> np.ndarray:
    """log q after filtering, float64 ``[n]``; a token that is not once in its support is an error."""
    matches = candidates.token_ids == token_ids[:, None]
    present = matches.sum(axis=1)
    if (present != 1).any():
        row = int(np.argmax(present != 1))
        raise ValueError(
            f"output_token_sampling_mask, row {row}: the sampled token {token_ids[row]} stands {present[row]} times in the "
            "support it was drawn from, and must stand once: are rows shifted?"
        )
    return candidates.log_probs[matches].astype(np.float64)


def _check_row_count(field: str, came: int, rows: int) -> None:
    if came != rows:
        raise ValueError(
            f"{field} has {came} rows for {rows} generated tokens: every token needs exactly one, none is cut or padded"
        )


def _column(entries: Sequence[Any], place: int, field: str, row: int | None = None) -> list[Any]:
    """One element of every ``[log-prob, id, text]``; ``row`` is given where the entries are one row's candidates."""
    try:
        return [entry[place] for entry in entries]
    except (TypeError, LookupError) as error:
        at, broken = next(
            (at, entry) for at, entry in enumerate(entries) if not (isinstance(entry, Sequence) and len(entry) > place)
        )
        raise ValueError(f"{field}, row {at if row is None else row}: {broken!r} in place of [log-prob, id, text]") from error


def _numbers(
    values: Sequence[Any], field: str, *, integers: bool = False, row_of: Callable[[int], int] = lambda place: place
) -> np.ndarray:
    """float64 or int64 array of JSON numbers, flat or in rows; null and strings are refused, with the row they stand in."""
    try:
        array = np.array(values) if len(values) else np.empty(0, np.int64)
    except ValueError:  # ragged: a list stands in a number's place
        array = np.empty(0, object)
    if array.dtype.kind not in ("iu" if integers else "iuf"):
        place, value = _first_non_number(values, integers)
        raise ValueError(f"{field}, row {row_of(place)}: {value!r} in place of {'a whole number' if integers else 'a number'}")
    return array.astype(np.int64 if integers else np.float64)


def _first_non_number(values: Sequence[Any], integers: bool) -> tuple[int, Any]:
    wanted = (int,) if integers else (int, float)
    in_rows = isinstance(values[0], list)
    for place, value in enumerate(values):
        for number in value if in_rows else [value]:
            if isinstance(number, bool) or not isinstance(number, wanted):
                return place, number
    return 0, values[0]


def _as_int32(ids: np.ndarray, field: str) -> np.ndarray:
    if ids.size and (ids.max() > np.iinfo(np.int32).max or ids.min() < np.iinfo(np.int32).min):
        raise ValueError(f"{field} holds an id beyond int32: these are not token ids")
    return ids.astype(np.int32)
