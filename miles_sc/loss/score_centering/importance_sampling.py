"""The weight functions f of CONTRACT 2, each as three closed forms that neither overflow nor divide zero by zero."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MODES = ("none", "tis", "mis")


class ImportanceSampling(Protocol):
    """A weight function ``f`` of the ratio ``r = p / q``. All three are used without a graph."""

    def head(self, p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
        """``q f(p/q)`` for candidates ``[T, K]``; ``log_ratio`` is ``log p - log q``."""

    def tail(self, rho: Tensor) -> Tensor:
        """``alpha = rho f(1/rho)`` for the modelled tail ``[T]``."""

    def sampled(self, log_ratio: Tensor) -> Tensor:
        """``f(p_y/q_y)`` for the sampled token ``[T]``."""


@dataclass(frozen=True)
class NoImportanceSampling:
    """``f(r) = 1``: the plain policy gradient, centred."""

    def head(self, p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
        return q

    def tail(self, rho: Tensor) -> Tensor:
        return rho

    def sampled(self, log_ratio: Tensor) -> Tensor:
        return torch.ones_like(log_ratio)


@dataclass(frozen=True)
class TruncatedImportanceSampling:
    """``f(r) = min(r, c)``."""

    clip: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"tis_clip = {self.clip}: the cap of a truncated weight must be finite and above 0, e.g. 2.0")

    def head(self, p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
        return torch.minimum(p, self.clip * q)

    def tail(self, rho: Tensor) -> Tensor:
        return (self.clip * rho).clamp(max=1.0)

    def sampled(self, log_ratio: Tensor) -> Tensor:
        return log_ratio.exp().clamp(max=self.clip)


@dataclass(frozen=True)
class MaskedImportanceSampling:
    """``f(r) = r`` if ``low <= r <= high`` else 0."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and 0 < self.low <= self.high):
            raise ValueError(
                f"mis_low = {self.low}, mis_high = {self.high}: the band of a masked weight must be finite with "
                "0 < mis_low <= mis_high, e.g. 0.5 and 5.0"
            )

    def _inside(self, log_ratio: Tensor) -> Tensor:
        # in log space, so that a ratio whose p and q both underflow is still judged; NaN is outside
        return (log_ratio >= math.log(self.low)) & (log_ratio <= math.log(self.high))

    def head(self, p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
        return torch.where(self._inside(log_ratio), p, 0.0)

    def tail(self, rho: Tensor) -> Tensor:
        return ((rho >= 1 / self.high) & (rho <= 1 / self.low)).to(rho.dtype)

    def sampled(self, log_ratio: Tensor) -> Tensor:
        return torch.where(self._inside(log_ratio), log_ratio.exp(), 0.0)


def importance_sampling(mode: str, *, tis_clip: float = 2.0, mis_low: float = 0.5, mis_high: float = 5.0) -> ImportanceSampling:
    """The weight function of a mode.

    All bounds are checked whatever the mode, so that a bad value does not wait for the day its mode is switched on.

    Raises:
        ValueError: unknown mode, or a bound that is not finite, not positive or out of order.
    """
    strategies: dict[str, ImportanceSampling] = {
        "none": NoImportanceSampling(),
        "tis": TruncatedImportanceSampling(tis_clip),
        "mis": MaskedImportanceSampling(mis_low, mis_high),
    }
    if mode not in strategies:
        raise ValueError(f"importance_sampling = {mode!r}: choose one of {', '.join(strategies)}")
    return strategies[mode]
