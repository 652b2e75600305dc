"""What a host logs of a rollout: how much of the sampler's distribution the recorded rows hold, before anything is trained."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles_sc.hosts.run import bound
from miles_sc.hosts.sample import check_aligned
from miles_sc.rollout.recorded_rows import RecordedRows


def rollout_metrics(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Around the function that makes metrics of ``(args, samples)``."""
    return {**wrapped(*args, **kwargs), **recorded_head(bound(wrapped, args, kwargs)["samples"])}


def recorded_head(samples: Sequence[Any]) -> dict[str, float]:
    """Over the trained tokens: the mass of their heads, and the share of them that lie in theirs.

    Returns:
        ``topk_head_mass``, its ``_min``, and ``topk_sampled_in_head``; nothing where nothing was recorded, as in evaluation.
    """
    masses, in_head = [np.empty(0, np.float32)], [np.empty(0, bool)]
    for sample in samples:
        rows = RecordedRows.of(sample, where=f"sample {sample.index}")
        if rows is None:
            continue
        check_aligned(sample, rows)
        trained = _trained(sample)
        response = np.asarray(sample.tokens[len(sample.tokens) - len(rows) :])
        masses.append(np.exp(rows.candidates.log_probs).sum(axis=1)[trained])
        in_head.append(rows.candidates.holding(response)[trained].any(axis=1))
    mass = np.concatenate(masses)
    if not len(mass):
        return {}
    return {
        "topk_head_mass": float(mass.mean(dtype=np.float64)),
        "topk_head_mass_min": float(mass.min()),
        "topk_sampled_in_head": float(np.concatenate(in_head).mean()),
    }


def _trained(sample: Any) -> np.ndarray:
    """Bool ``[R]``, before the host's conversion has written the mask out."""
    if getattr(sample, "remove_sample", False):
        return np.zeros(sample.response_length, bool)
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    if len(mask) != sample.response_length:
        raise ValueError(
            f"sample {sample.index}: its loss mask has {len(mask)} entries for {sample.response_length} response tokens"
        )
    return np.asarray(mask) > 0
