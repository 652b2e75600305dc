"""Reference KL and entropy, beside the loss (CONTRACT 4)."""

import torch
from torch import Tensor

# exp(40) still fits float32 with room for a sum; beyond it a token says "broken", not "far".
LARGEST_LOG_RATIO = 40.0
KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def reference_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    *,
    kind: str,
    active: Tensor,
    train_rollout_log_ratio: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Per-token estimate of KL(policy || reference), with graph.

    Args:
        log_probs: ``[T]`` of the sampled token, full vocabulary, with graph.
        ref_log_probs: ``[T]``.
        kind: ``k1`` (log-ratio), ``k2`` (half its square), ``k3`` or ``low_var_kl`` (k3 clamped to +-10).
        active: bool ``[T]``.
        train_rollout_log_ratio: ``log p - log q`` with graph, for the unbiased form: the estimate is weighted by ``p / q``.

    Returns:
        ``(kl [T], invalid [T])``: a token with a log-prob that is not finite, or a ratio beyond ``exp(40)``, counts 0 in the
        first and 1 in the second. Equal models give exactly 0.
    """
    difference = log_probs - ref_log_probs
    valid = active & _is_usable(difference)
    if train_rollout_log_ratio is not None:
        valid = valid & _is_usable(train_rollout_log_ratio)
    # replaced before exponentiation, so that no infinity reaches the gradient
    difference = torch.where(valid, difference, 0.0)
    kl = _estimate(difference, kind)
    if train_rollout_log_ratio is not None:
        kl = torch.where(valid, train_rollout_log_ratio, 0.0).exp() * kl
    return kl, (active & ~valid).to(kl.dtype)


def _is_usable(log_ratio: Tensor) -> Tensor:
    return log_ratio.isfinite() & (log_ratio.abs() <= LARGEST_LOG_RATIO)


def _estimate(difference: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind in ("k3", "low_var_kl"):
        k3 = torch.expm1(-difference) + difference
        return k3.clamp(-10, 10) if kind == "low_var_kl" else k3
    raise ValueError(f"--kl-loss-type {kind}: choose one of {', '.join(KL_TYPES)}")
