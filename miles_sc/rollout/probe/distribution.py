"""Reported distributions of one and the same token, compared."""

from collections.abc import Mapping

import numpy as np

from miles_sc.candidates import Candidates

# Two calls with one prompt differ by what batching and the prefix cache do to bf16 logits: some 0.1 on single ones, so a few
# per cent of the head's mass, and a swap among near-equal last candidates. Another token's head shares little of its mass.
SAME_HEAD = 0.25
# That noise moves the slope over 16 candidates by about 0.02, and 0.7, 1 and 1.3 lie 0.3 and more apart.
SLOPE_TOLERANCE = 0.1
# Below this spread of log-probs their float32 rounding shows in the slope.
FLAT = 1e-3

Head = Mapping[int, float]
"""Token id -> log-prob, of one token's likeliest candidates."""


def first_head(candidates: Candidates) -> Head:
    """The first row."""
    used = candidates.token_ids[0] >= 0
    return dict(zip(candidates.token_ids[0][used].tolist(), candidates.log_probs[0][used].astype(float).tolist(), strict=True))


def head_distance(one: Head, other: Head) -> float:
    """Total variation between two heads, each cut to the size of the smaller and renormalised; 0 equal, 1 disjoint."""
    size = min(len(one), len(other))
    first, second = (_renormalised(head, size) for head in (one, other))
    return sum(abs(first.get(token, 0.0) - second.get(token, 0.0)) for token in first.keys() | second.keys()) / 2


def slope(one: Head, other: Head) -> float | None:
    """How differences between candidates' log-probs in ``other`` follow those in ``one``; None where there are none to follow.

    Log-probs at temperature T are ``logits / T`` up to a constant, so from T to T' it is T / T'.
    """
    common = sorted(one.keys() & other.keys())
    if len(common) < 2:
        return None
    x, y = (np.array([head[token] for token in common]) for head in (one, other))
    x, y = x - x.mean(), y - y.mean()
    return None if np.ptp(x) < FLAT else float(x @ y / (x @ x))


def _renormalised(head: Head, size: int) -> dict[int, float]:
    best = sorted(head, key=lambda token: -head[token])[:size]
    weights = np.exp([head[token] - head[best[0]] for token in best])
    return dict(zip(best, (weights / weights.sum()).tolist(), strict=True))
