"""Answers of an engine with a known distribution over a small vocabulary, in every form that engines report it in."""

import base64
import dataclasses

import numpy as np

from miles_sc.rollout.response import append_candidates
from miles_sc.rollout.sample import Sample

VOCAB, K = 12, 4
PROMPT = [3, 1, 4]
FORMS = ("nested", "flat", "b64")


def log_distributions(rows, *, seed=0, vocab=VOCAB):
    """float32 ``[rows, vocab]``."""
    logits = 1.5 * np.random.default_rng(seed).standard_normal((rows, vocab))
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def answer(rows=3, *, seed=0, k=K, form="nested"):
    """``meta_info`` of unfiltered sampling; tokens lie inside and outside the head in turn."""
    log_q = log_distributions(rows, seed=seed)
    order = np.argsort(-log_q, axis=1)
    tokens = [int(order[row, row % 2 * (k + 1)]) for row in range(rows)]
    top = [[[float(log_q[row, i]), int(i), None] for i in order[row, :k]] for row in range(rows)]
    meta = _common(tokens, [float(log_q[row, token]) for row, token in enumerate(tokens)])
    return in_form({**meta, "output_top_logprobs": top}, form)


def support_answer(rows=3, *, seed=0, k=K, width=None):
    """``meta_info`` of filtered sampling, ids in order of id; rows of ``width`` ids, by default 1, 2, ... k in turn."""
    log_q = log_distributions(rows, seed=seed).astype(np.float64)
    kept = [np.sort(np.argsort(-log_q[row])[: width or row % k + 1]) for row in range(rows)]
    log_support = [log_q[row, ids] - np.log(np.exp(log_q[row, ids]).sum()) for row, ids in enumerate(kept)]
    tokens = [int(ids[row % len(ids)]) for row, ids in enumerate(kept)]
    meta = _common(tokens, [float(log_q[row, token]) for row, token in enumerate(tokens)])
    return {
        **meta,
        "output_token_sampling_mask": [ids.tolist() for ids in kept],
        "output_token_sampling_logprobs": [values.tolist() for values in log_support],
    }


def _common(tokens, log_probs):
    return {
        "output_token_logprobs": [[value, token, None] for value, token in zip(log_probs, tokens, strict=True)],
        "completion_tokens": len(tokens),
        "finish_reason": {"type": "length", "length": len(tokens)},
        "weight_version": "7",
    }


def in_form(meta, form):
    """Nested candidates as they are, flat, or flat in base64."""
    if form == "nested":
        return meta
    top = meta["output_top_logprobs"]
    flat = {
        "val": np.array([[entry[0] for entry in row] for row in top], np.float32),
        "idx": np.array([[entry[1] for entry in row] for row in top], np.int32),
    }
    meta = {name: value for name, value in meta.items() if name != "output_top_logprobs"}
    meta.update(output_top_logprobs_shape=list(flat["val"].shape), output_top_logprobs_null_prefix=0)
    for name, array in flat.items():
        field = f"output_top_logprobs_{name}_flat"
        if form == "flat":
            meta[field] = array.ravel().tolist()
        else:
            meta[f"{field}_b64"] = base64.b64encode(array.tobytes()).decode()
            meta[f"{field}_b64_dtype"] = array.dtype.name
    return meta


def sample_with(*metas, mode="selected", k=K, **fields):
    """A sample that has recorded these answers, one after the other."""
    sample = Sample(tokens=list(PROMPT), **fields)
    for meta in metas:
        append_candidates(sample, meta, k=k, mode=mode, vocab_size=VOCAB)
    return sample


def state(sample):
    """Everything a sample holds, as plain values to compare."""
    return {field.name: _plain(getattr(sample, field.name)) for field in dataclasses.fields(sample)}


def _plain(value):
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tolist()
    return state(value) if dataclasses.is_dataclass(value) else list(value) if isinstance(value, list) else value
