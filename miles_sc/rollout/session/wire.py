"""Samples as one safetensors body: arrays under ``field.index``, everything else as JSON in ``_samples_meta``."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import orjson
from safetensors import SafetensorError
from safetensors.numpy import load, save

from miles_sc.rollout.sample import Sample
from miles_sc.sampling_support import SamplingSupport

META = "_samples_meta"
_FORMAT = 1
# Per-token lists travel as arrays of these types; values that would change are refused.
_LISTS = {"tokens": np.int32, "loss_mask": np.int8, "rollout_log_probs": np.float64}
_ARRAYS = {"rollout_topk_token_ids": np.int32, "rollout_topk_log_probs": np.float32}
_SUPPORT = "rollout_sampling_mask"
_VERSIONS = "weight_versions"
_SCALARS = {
    "response_length": int,
    "index": int,
    "group_index": int,
    "reward": float,
    "response": str,
    "truncated": bool,
    "aborted": bool,
    "turns": int,
}


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """The body that `decode_samples` reads. What a sample does not have leaves no trace in it.

    Raises:
        ValueError: a value that would not come back as it is, with the sample's place and its field.
    """
    tensors: dict[str, np.ndarray] = {}
    metas = []
    for place, sample in enumerate(samples):
        arrays = _arrays(sample, place)
        tensors.update({_name(field, place): array for field, array in arrays.items()})
        metas.append(_scalars(sample, place) | {"arrays": sorted(arrays)})
    try:
        meta = orjson.dumps({"format": _FORMAT, "samples": metas})
    except TypeError as error:
        raise ValueError(f"a sample's text or weight version cannot be written as JSON: {error}") from error
    return save({META: np.frombuffer(meta, np.uint8), **tensors})


def decode_samples(body: bytes) -> list[Sample]:
    """The samples of a body that `encode_samples` or ``POST /sessions/{id}/samples`` gave.

    Raises:
        ValueError: a truncated body, a tensor that is missing, of another type or shape, or that no sample refers to.
    """
    tensors = _load(body)
    samples = []
    for place, meta in enumerate(_read_meta(tensors)):
        where = f"sample {place}"
        arrays = {field: _take(tensors, _name(field, place)) for field in _check_meta(meta, where)}
        samples.append(_sample(meta, arrays, where))
    if tensors:
        raise ValueError(f"no sample refers to the tensors {sorted(tensors)[:5]}: was the body put together from two?")
    return samples


# --- encoding


def _arrays(sample: Sample, place: int) -> dict[str, np.ndarray]:
    arrays = {}
    for field, dtype in _LISTS.items():
        if (value := getattr(sample, field)) is not None:
            arrays[field] = _exactly(value, dtype, f"sample {place}: {field}")
    for field, dtype in _ARRAYS.items():
        if (value := getattr(sample, field)) is not None:
            if not isinstance(value, np.ndarray) or value.dtype != dtype:
                kind = getattr(value, "dtype", type(value).__name__)
                raise ValueError(f"sample {place}: {field} is {kind}: give a numpy {np.dtype(dtype).name} array")
            arrays[field] = np.ascontiguousarray(value)
    if sample.rollout_sampling_mask is not None:
        arrays[f"{_SUPPORT}.ids"] = np.ascontiguousarray(sample.rollout_sampling_mask.ids)
        arrays[f"{_SUPPORT}.offsets"] = np.ascontiguousarray(sample.rollout_sampling_mask.offsets)
    return arrays


def _scalars(sample: Sample, place: int) -> dict[str, Any]:
    meta = {}
    for field, kind in _SCALARS.items():
        value = getattr(sample, field)
        if value is None and field == "reward":
            continue
        if not _is(value, kind):
            raise ValueError(f"sample {place}: {field} = {value!r}: give {_wanted(kind)}")
        meta[field] = value
    if sample.weight_versions is not None:
        meta[_VERSIONS] = [[version, len(list(run))] for version, run in groupby(sample.weight_versions)]
    return meta


def _exactly(values: Sequence[Any], dtype: type, what: str) -> np.ndarray:
    array = np.asarray(values) if len(values) else np.empty(0, dtype)
    exact = array.astype(dtype) if array.dtype.kind in "iuf" and array.ndim == 1 else None
    if exact is None or (np.dtype(dtype).kind == "i" and not np.array_equal(exact, array)):
        raise ValueError(f"{what} does not fit {np.dtype(dtype).name}: {str(values)[:80]}")
    return exact


# --- decoding


def _load(body: bytes) -> dict[str, np.ndarray]:
    try:
        return load(bytes(body))
    except SafetensorError as error:
        raise ValueError(f"a body of {len(body)} bytes is no safetensors ({error}): was it cut short?") from error
    except KeyError as error:
        raise ValueError(f"the body holds a tensor of type {error}, which no sample has") from error


def _read_meta(tensors: dict[str, np.ndarray]) -> list[Any]:
    raw = tensors.pop(META, None)
    if raw is None or raw.dtype != np.uint8 or raw.ndim != 1:
        raise ValueError(f"{META} is missing or no flat uint8: these are not samples")
    try:
        meta = orjson.loads(raw.tobytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{META} is no JSON: {error}") from None
    if not (isinstance(meta, dict) and meta.get("format") == _FORMAT and isinstance(meta.get("samples"), list)):
        raise ValueError(f"{META} is not of format {_FORMAT}: do both sides run the same release?")
    return meta["samples"]


def _check_meta(meta: Any, where: str) -> list[str]:
    """The names of a sample's arrays."""
    if not isinstance(meta, Mapping):
        raise ValueError(f"{where}: {str(meta)[:80]} in place of its fields")
    unknown = set(meta) - set(_SCALARS) - {"arrays", _VERSIONS}
    missing = set(_SCALARS) - {"reward"} - set(meta)
    if unknown or missing:
        raise ValueError(f"{where}: fields {sorted(unknown)} are unknown and {sorted(missing)} are missing")
    for field, kind in _SCALARS.items():
        if field in meta and not _is(meta[field], kind):
            raise ValueError(f"{where}: {field} = {meta[field]!r}: wanted {_wanted(kind)}")
    arrays = meta.get("arrays")
    known = {*_LISTS, *_ARRAYS, f"{_SUPPORT}.ids", f"{_SUPPORT}.offsets"}
    if not (isinstance(arrays, list) and all(isinstance(name, str) for name in arrays) and set(arrays) <= known):
        raise ValueError(f"{where}: arrays = {str(arrays)[:80]}: wanted names among {sorted(known)}")
    for one, other in (list(_ARRAYS), [f"{_SUPPORT}.ids", f"{_SUPPORT}.offsets"]):
        if (one in arrays) != (other in arrays):
            raise ValueError(f"{where} has one of {one} and {other}: both belong together")
    if "tokens" not in arrays:
        raise ValueError(f"{where} has no tokens")
    return arrays


def _take(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name not in tensors:
        raise ValueError(f"the tensor {name} is missing: was the body put together from parts?")
    return tensors.pop(name)


def _sample(meta: Mapping[str, Any], arrays: dict[str, np.ndarray], where: str) -> Sample:
    sample = Sample(**{field: meta[field] for field in _SCALARS if field in meta})
    for field, dtype in _LISTS.items():
        if field in arrays:
            setattr(sample, field, _typed(arrays[field], dtype, 1, f"{where}: {field}").tolist())
    for field, dtype in _ARRAYS.items():
        if field in arrays:
            setattr(sample, field, _typed(arrays[field], dtype, 2, f"{where}: {field}"))
    if f"{_SUPPORT}.ids" in arrays:
        ids = _typed(arrays[f"{_SUPPORT}.ids"], np.int32, 1, f"{where}: {_SUPPORT}.ids")
        offsets = _typed(arrays[f"{_SUPPORT}.offsets"], np.int64, 1, f"{where}: {_SUPPORT}.offsets")
        sample.rollout_sampling_mask = _valid(lambda: SamplingSupport(ids, offsets), where)
    if _VERSIONS in meta:
        sample.weight_versions = _versions(meta[_VERSIONS], sample.response_length, where)
    _valid(lambda: sample.candidates, where)
    _valid(sample.check_rows, where)
    return sample


def _versions(runs: Any, rows: int, where: str) -> list[str]:
    try:
        valid = all(isinstance(version, str) and _is(count, int) and count > 0 for version, count in runs)
    except (TypeError, ValueError):
        valid = False
    if not valid or sum(count for _, count in runs) != rows:
        raise ValueError(f"{where}: {_VERSIONS} = {str(runs)[:80]}: wanted [version, tokens] for every run, {rows} tokens in all")
    return [version for version, count in runs for _ in range(count)]


def _typed(array: np.ndarray, dtype: type, dimensions: int, what: str) -> np.ndarray:
    if array.dtype != dtype or array.ndim != dimensions:
        raise ValueError(f"{what} came as {array.dtype} {array.shape}: wanted {np.dtype(dtype).name}, {dimensions}-dimensional")
    return array


def _valid(build: Callable[[], Any], where: str) -> Any:
    try:
        return build()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


# --- both


def _name(field: str, place: int) -> str:
    return f"{field}.{place}"


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _wanted(kind: type) -> str:
    return {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}[kind]
