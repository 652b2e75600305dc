"""One answer of SGLang's native ``/generate`` (0.5.23), from recorded arrays: nested, flat or flat base64."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
import pybase64

from miles_sc.rollout.engines.batch import Generation
from miles_sc.rollout.engines.native_request import NativeRequest


def build_answer(
    request: NativeRequest,
    generation: Generation,
    *,
    detokenize: Callable[[list[int]], str] | None,
    weight_version: str,
    latency: float,
) -> dict[str, Any]:
    """The JSON value of one call, its fields in the server's order.

    Args:
        request: what was asked.
        generation: ``n`` recorded tokens; ``n = 0`` answers without the stray candidate row that the server sends.
        detokenize: makes the text, from the tokens without a matched stop token; None leaves it empty.
        weight_version: of the weights that every token was drawn from.
        latency: seconds.
    """
    token_ids = generation.token_ids.tolist()
    count = len(token_ids)
    finish_reason = _finish_reason(request, token_ids)
    spoken = token_ids[:-1] if finish_reason["type"] == "stop" else token_ids
    meta_info: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        "finish_reason": finish_reason,
        "prompt_tokens": len(request.input_ids),
        "weight_version": weight_version,
        "num_retractions": 0,
    }
    if request.return_logprob:
        log_probs = generation.log_probs.tolist()
        meta_info["input_token_logprobs"] = []
        meta_info["output_token_logprobs"] = [
            [value, token_id, None] for value, token_id in zip(log_probs, token_ids, strict=True)
        ]
        meta_info["output_token_logprobs_length"] = count
    if request.top_logprobs_num:
        meta_info["input_top_logprobs"] = []
        meta_info.update(_top_log_probs(request, generation))
    if request.sampling_mask:
        meta_info.update(_sampling_mask(request, generation))
    meta_info |= {
        "reasoning_tokens": 0,
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_versions": [{"version": weight_version, "start": 0, "end": count}],
        "cached_tokens_details": {"device": 0, "host": 0},
        "dp_rank": None,
        "e2e_latency": latency,
        "response_sent_to_client_ts": time.time(),
    }
    text = "" if detokenize is None else detokenize(spoken)
    return {"text": text, "output_ids": token_ids, "meta_info": meta_info}


def _finish_reason(request: NativeRequest, token_ids: list[int]) -> dict[str, Any]:
    # Length wins where the last token allowed is also a stop token, as on the server.
    if len(token_ids) == request.max_new_tokens:
        return {"type": "length", "length": len(token_ids)}
    return {"type": "stop", "matched": token_ids[-1]}


def _top_log_probs(request: NativeRequest, generation: Generation) -> dict[str, Any]:
    width = request.top_logprobs_num
    shape = [len(generation.token_ids), width]
    token_ids = np.ascontiguousarray(generation.head_token_ids[:, :width], dtype="<i4")
    log_probs = np.ascontiguousarray(generation.head_log_probs[:, :width], dtype="<f4")
    if request.base64:
        return {
            "output_top_logprobs_val_flat_b64": pybase64.b64encode(log_probs.tobytes()).decode("ascii"),
            "output_top_logprobs_idx_flat_b64": pybase64.b64encode(token_ids.tobytes()).decode("ascii"),
            "output_top_logprobs_val_flat_b64_dtype": "float32",
            "output_top_logprobs_idx_flat_b64_dtype": "int32",
            "output_top_logprobs_shape": shape,
            "output_top_logprobs_null_prefix": 0,
        }
    if request.flat:
        return {
            "output_top_logprobs_val_flat": log_probs.ravel().tolist(),
            "output_top_logprobs_idx_flat": token_ids.ravel().tolist(),
            "output_top_logprobs_shape": shape,
            "output_top_logprobs_null_prefix": 0,
        }
    rows = zip(log_probs.tolist(), token_ids.tolist(), strict=True)
    return {"output_top_logprobs": [list(map(list, zip(values, ids, repeat(None)))) for values, ids in rows]}


def _sampling_mask(request: NativeRequest, generation: Generation) -> dict[str, Any]:
    lengths = generation.support_lengths.tolist()
    token_ids = generation.head_token_ids.tolist()
    if request.sampling_logprobs_mode == "support":
        rows = zip(generation.support_log_probs.tolist(), lengths, strict=True)
        log_probs = [row[:length] for row, length in rows]
    else:
        log_probs = generation.support_log_probs_of_token.tolist()
    return {
        "output_token_sampling_mask": [row[:length] for row, length in zip(token_ids, lengths, strict=True)],
        "output_token_sampling_logprobs": log_probs,
        "output_token_sampling_mask_length": len(lengths),
    }
