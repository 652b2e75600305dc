"""Log-probs under a replayed sampling support: only the support's logits are read, and only they get a gradient."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles_sc.loss.logit_rows import LogitRows
from miles_sc.loss.vocabulary import accumulation_dtype, check_scoring_inputs, chunk_rows, logits_shard


def support_log_probs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    rows: Sequence[int] | np.ndarray | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probs of selected tokens normalised over a recorded sampling support (top-p/top-k replay).

    Only the ``1 + K`` logits of a row are read, and only tensors of that width are saved. Off the support the gradient is
    exactly zero.

    Args:
        logits, rows, group, vocab_size, temperature: as in :func:`miles_sc.selected_log_probs`.
        token_ids: integer ``[T, 1+K]``: the sampled token, then the support it was drawn from, padded with -1.
        with_entropy: also return the entropy over the support.

    Returns:
        float32 ``[T, 1+K]`` (float64 for float64 logits), 0 at padding and in rows without support; with entropy
        ``(log_probs, entropy [T])``.

    Raises:
        ValueError: as :func:`miles_sc.selected_log_probs`.
    """
    shard = logits_shard(logits, group, vocab_size)
    scored = LogitRows.of(rows, len(logits))
    check_scoring_inputs(token_ids, len(scored), shard.vocab_size, temperature=temperature)
    token_ids = token_ids.long()
    scaled = _GatherSelected.apply(logits, token_ids, scored, shard) / temperature
    has_support = (token_ids[:, 1:] >= 0).any(dim=1, keepdim=True)
    valid = (token_ids >= 0) & has_support
    # a row without support is given a single 0, so that its logsumexp and gradient stay finite
    support = torch.where(valid[:, 1:], scaled[:, 1:], -torch.inf)
    support = torch.where(has_support, support, 0.0)
    log_probs = torch.where(valid, scaled - support.logsumexp(dim=1, keepdim=True), 0.0)
    log_probs = shard.nan_outside(log_probs, token_ids)
    if not with_entropy:
        return log_probs
    head = log_probs[:, 1:]
    counted = torch.where(valid[:, 1:] & (head > -torch.inf), head, 0.0)  # p log p is 0 where p is 0
    return log_probs, -(torch.where(valid[:, 1:], head.exp(), 0.0) * counted).sum(dim=1)


class _GatherSelected(torch.autograd.Function):
    """Raw logits of ids ``[T, 1+K]`` from T rows of ``[S, V/TP]``, 0 where the id is -1. Forward: one SUM over the group."""

    @staticmethod
    def forward(ctx, logits, token_ids, rows, shard):
        columns, owned = shard.local(token_ids)
        ctx.save_for_backward(columns, owned)
        ctx.like = (logits.shape, logits.dtype, rows)
        dtype = accumulation_dtype(logits)
        if logits.shape[1] == 0:  # a rank without columns still takes part
            return shard.sum(torch.zeros(token_ids.shape, dtype=dtype, device=logits.device))
        gathered = torch.cat([logits[run].gather(1, columns[part]) for run, part in rows])
        return shard.sum(torch.where(owned, gathered.to(dtype), 0.0))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        columns, owned = ctx.saved_tensors
        shape, dtype, rows = ctx.like
        gradient = torch.zeros(shape, dtype=dtype, device=grad.device)
        if shape[1] == 0:
            return gradient, None, None, None
        owned_grad = torch.where(owned, grad, 0.0)
        for run, part in rows:
            _add_selected(gradient[run], columns[part], owned_grad[part])
        return gradient, None, None, None


def _add_selected(gradient: Tensor, columns: Tensor, values: Tensor) -> None:
    """Adds ``[T, 1+K]`` to the columns of zeros ``[T, V/TP]``; a sampled token stands in its support too."""
    if gradient.dtype == values.dtype:
        gradient.scatter_add_(1, columns, values)
        return
    # both gradients of such a token are added before they are rounded
    step = chunk_rows(gradient)
    for rows in (slice(start, start + step) for start in range(0, len(gradient), step)):
        exact = torch.zeros_like(gradient[rows], dtype=values.dtype)
        gradient[rows] = exact.scatter_add_(1, columns[rows], values[rows])
