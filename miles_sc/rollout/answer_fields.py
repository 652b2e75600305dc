"""The fields of an answer's ``meta_info`` as arrays: what was sampled, and candidates in each form that they come in."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pybase64

from miles_sc.candidates import Candidates
from miles_sc.rollout.json_numbers import FLOAT32, FLOAT64, INT32, INT64, read_numbers
from miles_sc.sampling_support import SamplingSupport

SAMPLED = "output_token_logprobs"
NESTED = "output_top_logprobs"
SHAPE, NULL_PREFIX = f"{NESTED}_shape", f"{NESTED}_null_prefix"
FLAT_LOG_PROBS, FLAT_IDS = f"{NESTED}_val_flat", f"{NESTED}_idx_flat"
SUPPORT_IDS, SUPPORT_LOG_PROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"

# What an answer holds of candidates, by the names' beginnings.
CANDIDATE_FIELDS = (NESTED, "input_top_logprobs", "output_token_sampling")

_ROUTE = (
    "the route between trainer and engine may cap or drop candidates (a router that allows 20 on chat, a layer that does not "
    "know the field, entries merged by token text); ask the engine directly or update that layer"
)
_IN_BASE64 = {FLOAT32: np.dtype("<f4"), INT32: np.dtype("<i4")}


def sampled_tokens(meta_info: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 ``[n]`` and log-probs float64 ``[n]`` of the generated tokens.

    Raises:
        ValueError: missing, not as many as were generated, or something else in a number's place.
    """
    entries, generated = meta_info.get(SAMPLED), meta_info.get("completion_tokens")
    if entries is None and generated != 0:
        raise ValueError(
            f"{SAMPLED} is missing from meta_info: ask with return_logprob (native) or logprobs and return_meta_info (chat)"
        )
    entries = _rows([] if entries is None else entries, SAMPLED)
    try:
        log_probs, ids = [entry[0] for entry in entries], [entry[1] for entry in entries]
    except (TypeError, LookupError) as error:
        raise _no_entry(entries, SAMPLED) from error
    log_probs, ids = read_numbers(log_probs, FLOAT64, SAMPLED), read_numbers(ids, INT64, SAMPLED)
    if generated is not None and generated != ids.size:
        raise ValueError(f"{SAMPLED} has {ids.size} rows for {generated} generated tokens: every token needs exactly one")
    return ids, log_probs


def top_candidates(meta_info: Mapping[str, Any], rows: int, width: int) -> Candidates:
    """The ``width`` likeliest of each of ``rows`` tokens; may be read-only views of what was decoded.

    Raises:
        ValueError: missing, more or fewer than that, or something else in a number's place.
    """
    read = _nested_candidates if meta_info.get(SHAPE) is None else _flat_candidates
    return read(meta_info, rows, width)


def _nested_candidates(meta_info: Mapping[str, Any], rows: int, width: int) -> Candidates:
    table = meta_info.get(NESTED)
    if table is None:
        raise ValueError(f"{NESTED} is missing: {width} candidates were asked for and none came; {_ROUTE}")
    _check_row_count(NESTED, len(_rows(table, NESTED)), rows)
    if not (_row_lengths(table) == width).all():
        row, came = next((row, _length(entries)) for row, entries in enumerate(table) if _length(entries) != width)
        raise ValueError(f"{NESTED}, row {row}: {max(came, 0)} candidates came and {width} were asked for; {_ROUTE}")
    try:
        log_probs = [entry[0] for entries in table for entry in entries]
        ids = [entry[1] for entries in table for entry in entries]
    except (TypeError, LookupError) as error:
        raise _no_entry(chain.from_iterable(table), NESTED, width) from error
    log_probs = read_numbers(log_probs, FLOAT32, NESTED, row_of=lambda place: place // width)
    ids = read_numbers(ids, INT32, NESTED, row_of=lambda place: place // width)
    return Candidates(ids.reshape(rows, width), log_probs.reshape(rows, width))


def _flat_candidates(meta_info: Mapping[str, Any], rows: int, width: int) -> Candidates:
    shape, prefix = meta_info[SHAPE], meta_info.get(NULL_PREFIX) or 0
    if not (isinstance(shape, Sequence) and len(shape) == 2 and all(type(size) is int and size >= 0 for size in shape)):
        raise ValueError(f"{SHAPE} = {shape!r}: wanted [tokens, candidates]")
    if prefix:
        raise ValueError(f"{NULL_PREFIX} = {prefix}: a generated token without candidates cannot be trained on")
    _check_row_count(SHAPE, shape[0], rows)
    if shape[1] != width:
        raise ValueError(f"{SHAPE} = {shape}: {shape[1]} candidates came and {width} were asked for; {_ROUTE}")
    log_probs = _flat_numbers(meta_info, FLAT_LOG_PROBS, FLOAT32, (rows, width))
    return Candidates(_flat_numbers(meta_info, FLAT_IDS, INT32, (rows, width)), log_probs)


def _flat_numbers(meta_info: Mapping[str, Any], field: str, kind: str, shape: tuple[int, int]) -> np.ndarray:
    if meta_info.get(f"{field}_b64") is not None:
        flat = _decoded(meta_info, f"{field}_b64", _IN_BASE64[kind])
    elif meta_info.get(field) is not None:
        flat = read_numbers(meta_info[field], kind, field, row_of=lambda place: place // shape[1])
    else:
        raise ValueError(f"neither {field} nor {field}_b64 came with {SHAPE} {list(shape)}; {_ROUTE}")
    if flat.size != shape[0] * shape[1]:
        raise ValueError(f"{field} holds {flat.size} numbers and {SHAPE} says {list(shape)}: was it truncated?")
    return flat.reshape(shape)


def _decoded(meta_info: Mapping[str, Any], field: str, dtype: np.dtype) -> np.ndarray:
    declared = meta_info.get(f"{field}_dtype", dtype.name)
    if declared != dtype.name:
        raise ValueError(f"{field}_dtype = {declared!r}: only {dtype.name} is read")
    try:
        raw = pybase64.b64decode(meta_info[field], validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{field} is not base64 ({error}): was the answer truncated?") from error
    if len(raw) % dtype.itemsize:
        raise ValueError(f"{field} holds {len(raw)} bytes, no whole number of {dtype.name}: was it truncated?")
    return np.frombuffer(raw, dtype)


def support_candidates(meta_info: Mapping[str, Any], rows: int, k: int) -> tuple[Candidates, SamplingSupport]:
    """Everything that filtered sampling could draw each of ``rows`` tokens from, at most k ids, dense and as compressed rows.

    Raises:
        ValueError: missing, more than k, of unequal lengths, or something else in a number's place.
    """
    id_rows, value_rows = meta_info.get(SUPPORT_IDS), meta_info.get(SUPPORT_LOG_PROBS)
    for field, table in ((SUPPORT_IDS, id_rows), (SUPPORT_LOG_PROBS, value_rows)):
        if table is None:
            raise ValueError(f"{field} is missing from an answer to filtered sampling; {_ROUTE}")
        _check_row_count(field, len(_rows(table, field)), rows)
    lengths = _row_lengths(id_rows)
    if lengths.min() < 0 or lengths.max() > k or (lengths != _row_lengths(value_rows)).any():
        raise _unfit_support(id_rows, value_rows, k)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])

    def row_of(place: int) -> int:
        return int(np.searchsorted(offsets, place, side="right")) - 1

    ids = read_numbers(list(chain.from_iterable(id_rows)), INT32, SUPPORT_IDS, row_of=row_of)
    log_probs = read_numbers(list(chain.from_iterable(value_rows)), FLOAT32, SUPPORT_LOG_PROBS, row_of=row_of)
    support = SamplingSupport(ids, offsets)
    return Candidates(support.padded(k), support.spread(log_probs, k, -np.inf)), support


def _unfit_support(id_rows: Sequence[Any], value_rows: Sequence[Any], k: int) -> ValueError:
    for row, (ids, values) in enumerate(zip(id_rows, value_rows, strict=True)):
        if _length(ids) < 0:
            return ValueError(f"{SUPPORT_IDS}, row {row}: {ids!r} in place of a list of ids")
        if _length(values) != len(ids):
            return ValueError(
                f"{SUPPORT_LOG_PROBS}, row {row}: its log-probs do not match the {len(ids)} ids of {SUPPORT_IDS}; ask for "
                "support mode"
            )
        if len(ids) > k:
            break
    return ValueError(
        f"{SUPPORT_IDS}, row {row}: the sampling support exceeds the arrays, {len(ids)} ids for {k} slots; raise "
        f"--rollout-top-logprobs-num to at least {len(ids)}"
    )


def _rows(table: Any, field: str) -> Sequence[Any]:
    if not isinstance(table, list | tuple):
        raise ValueError(f"{field} = {table!r}: wanted a list with one row per generated token")
    return table


def _row_lengths(table: Sequence[Any]) -> np.ndarray:
    """int64 ``[rows]``, -1 for what is no list."""
    if {list, tuple}.issuperset(map(type, table)):
        return np.fromiter(map(len, table), np.int64, len(table))
    return np.array([_length(row) for row in table])


def _length(row: Any) -> int:
    return len(row) if isinstance(row, list | tuple) else -1


def _no_entry(entries: Iterable[Any], field: str, per_row: int = 1) -> ValueError:
    place, broken = next(
        (place, entry) for place, entry in enumerate(entries) if not (isinstance(entry, Sequence) and len(entry) > 1)
    )
    return ValueError(f"{field}, row {place // per_row}: {broken!r} in place of [log-prob, id, text]")


def _check_row_count(field: str, came: int, rows: int) -> None:
    if came != rows:
        raise ValueError(
            f"{field} has {came} rows for {rows} generated tokens: every token needs exactly one, none is cut or padded"
        )
