"""Reported distributions of one and the same token, compared."""

import math
from collections.abc import Mapping

import numpy as np

from miles_sc.candidates import Candidates

# Batching and the prefix cache move bf16 logits by some 0.1 between two calls with one prompt. Simulated, that parts the heads
# of the same token by up to 0.15 where they are peaked and 0.4 where they are nearly flat; another token's shares little mass.
SAME_HEAD = 0.5
# The same noise moves the exponent by up to 0.3 where the fit is good, and by more only where it is not.
EXPONENT_TOLERANCE = 0.4
GOOD_FIT = 0.9
# Below this spread of log-probs their float32 rounding shows in the exponent.
FLAT = 1e-3
# Candidates of equal logits: what float32 makes of one probability.
TIE = 1e-6

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


def temperature_exponent(hot: Head, cold: Head, ratio: float) -> tuple[float, float] | None:
    """How log-probs follow the temperature, from reports of one token at two.

    Log-probs at temperature T are ``logits / T`` up to a constant, so their differences go with ``T ** -1``.

    Args:
        ratio: the hot temperature over the cold one.

    Returns:
        u where differences between candidates go with ``T ** -u``, and the fit's R squared; None where none differ.
    """
    common = sorted(hot.keys() & cold.keys())
    if len(common) < 2:
        return None
    x, y = (np.array([head[token] for token in common]) for head in (hot, cold))
    if min(np.ptp(x), np.ptp(y)) < FLAT:
        return None
    x, y = x - x.mean(), y - y.mean()
    slope = max(float(x @ y / (x @ x)), 1e-9)
    return math.log(slope) / math.log(ratio), float((x @ y) ** 2 / (x @ x) / (y @ y))


def _renormalised(head: Head, size: int) -> dict[int, float]:
    best = sorted(head, key=lambda token: -head[token])[:size]
    weights = np.exp([head[token] - head[best[0]] for token in best])
    return dict(zip(best, (weights / weights.sum()).tolist(), strict=True))
