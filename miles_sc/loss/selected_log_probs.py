"""Log-probs of a few selected tokens per row of logits, without a second tensor of the logits' size.

An explicit autograd Function on this rank's columns. Since the loss is replicated over the tensor-parallel group, forward
reduces and backward reduces nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles_sc.loss.logit_rows import LogitRows
from miles_sc.loss.scoring_kernel import RowGradient, RowStatistics, ScoringKernel
from miles_sc.loss.torch_scoring import TorchKernel
from miles_sc.loss.vocabulary import VocabularyShard, check_scoring_inputs, chunk_rows, logits_shard


def selected_log_probs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    rows: Sequence[int] | np.ndarray | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk_size: int = -1,
    inplace_backward: bool = False,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probs of selected tokens under ``softmax(logits / temperature)`` over the true vocabulary.

    Saved for backward: the live logits, the ids and one scalar per row, another with entropy. On CUDA a Triton kernel reads each
    logit once forward, once backward; it saves another scalar per row and the selected logits.

    Args:
        logits: ``[T, V/TP]``, this rank's columns.
        token_ids: integer ``[T, 1+K]`` of global ids, column 0 the sampled token. -1 gives 0 and no gradient; an id may
            stand twice.
        rows: ``[T]``, ascending, on the host: the logits are ``[S, V/TP]`` and only these rows are scored, where they lie: no
            copy is made of them. The others get a gradient of 0. Default: all, in order.
        group: tensor-parallel group; forward makes one MAX and two SUM reductions of per-row floats, backward none.
        vocab_size: true vocabulary; columns beyond it (Megatron's padding) are excluded and get no gradient.
        temperature: the sampler's.
        chunk_size: rows scored at a time; -1 chooses what suits the device. The Triton kernel has no chunks.
        inplace_backward: write the gradient over the logits. They must not be read after that: not with a recomputed loss.
        with_entropy: also return the entropy of the same distribution.

    Returns:
        float32 ``[T, 1+K]`` (float64 for float64 logits); with entropy ``(log_probs, entropy [T])``.

    Raises:
        ValueError: shapes, rows, vocabulary, temperature, chunk size; ids out of range (on the CPU, where looking costs no sync).
    """
    shard = logits_shard(logits, group, vocab_size)
    scored = LogitRows.of(rows, len(logits))
    check_scoring_inputs(token_ids, len(scored), shard.vocab_size, temperature=temperature, chunk_size=chunk_size)
    if inplace_backward and _overlaps(logits):
        raise ValueError(f"logits with strides {logits.stride()} overlap: their gradient cannot be written over them; copy them")
    kernel = _kernel(logits, shard, float(temperature), chunk_size)
    log_probs, entropy = _SelectedLogProbs.apply(logits, token_ids.long(), scored, kernel, inplace_backward, with_entropy)
    return (log_probs, entropy) if with_entropy else log_probs


def _overlaps(matrix: Tensor) -> bool:
    """Whether two elements may lie in one place."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(matrix.shape, matrix.stride(), strict=True) if size > 1):
        if stride <= reach:
            return matrix.numel() > 0
        reach += stride * (size - 1)
    return False


def _kernel(logits: Tensor, shard: VocabularyShard, temperature: float, chunk_size: int) -> ScoringKernel:
    if logits.is_cuda:  # a CPU does not import Triton
        from miles_sc.loss import triton_scoring

        if triton_scoring.is_available(logits):
            return triton_scoring.TritonKernel(shard, temperature)
    return TorchKernel(shard, temperature, chunk_rows(logits) if chunk_size == -1 else chunk_size)


class _SelectedLogProbs(torch.autograd.Function):
    """``log p = z - logsumexp(z)`` for ids ``[T, 1+K]`` and ``z = logits[rows, V/TP] / temperature``.

    Forward reduces over the group: MAX and SUM of ``[T]``, SUM of ``[T, 1+K]``, with entropy SUM of ``[T]`` more.
    Backward, on the local columns: ``dz = scatter(g) - (sum g) p - h p (log p + H)``, where g and h are the upstream
    gradients of log-probs and entropy.
    """

    @staticmethod
    def forward(ctx, logits, token_ids, rows, kernel, inplace_backward, with_entropy):
        shard: VocabularyShard = kernel.shard
        columns, owned = shard.local(token_ids)
        statistics = kernel.statistics(logits, rows, columns, owned, with_entropy=with_entropy)
        top, log_sum = shard.combine(statistics.largest, statistics.log_sum)
        log_probs = shard.log_probs(statistics.selected, top, log_sum, token_ids)

        below_top = _where_mass(statistics, statistics.largest - top, shard, otherwise=-torch.inf)
        to_p = (below_top + statistics.log_unit - log_sum).exp()  # from the kernel's exp to p of the whole vocabulary
        to_p = _where_mass(statistics, to_p, shard, otherwise=0.0)
        saved, entropy = [logits, token_ids, to_p], log_probs.new_zeros(0)
        if with_entropy:
            share = (below_top + statistics.log_sum - log_sum).exp()
            entropy = log_sum - shard.sum(_where_mass(statistics, share * (statistics.mean + below_top), shard, otherwise=0.0))
            saved += [top + log_sum - entropy]
        else:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(*saved, *statistics.saved)
        ctx.settings = (rows, kernel, inplace_backward, with_entropy)
        ctx.set_materialize_grads(False)  # an entropy that is only observed costs nothing in backward
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        rows, kernel, inplace_backward, with_entropy = ctx.settings
        logits, token_ids, to_p, *saved = ctx.saved_tensors
        entropy_shift = saved.pop(0) if with_entropy else None
        if not with_entropy:  # a compiled graph hands in zeros where eager autograd hands in nothing
            grad_entropy = None
        if grad_log_probs is None:
            grad_log_probs = to_p.new_zeros(token_ids.shape)
        columns, owned = kernel.shard.local(token_ids)
        total = torch.where(token_ids >= 0, grad_log_probs, 0.0).sum(dim=1)
        gradient = logits if inplace_backward else torch.empty_like(logits, memory_format=torch.contiguous_format)
        upstream = RowGradient(
            selected=torch.where(owned, grad_log_probs, 0.0) / kernel.temperature,
            scale=-total * to_p / kernel.temperature,
            entropy_scale=None if grad_entropy is None else -grad_entropy * to_p / kernel.temperature,
            entropy_shift=None if grad_entropy is None else entropy_shift,
        )
        kernel.write_gradient(gradient, logits, rows, columns, owned, upstream, tuple(saved))
        for unscored in rows.others():
            gradient[unscored] = 0
        return gradient, None, None, None, None, None


def _where_mass(statistics: RowStatistics, values: Tensor, shard: VocabularyShard, *, otherwise: float) -> Tensor:
    """A rank without mass in a row adds nothing to it. On one rank such a row has no distribution, and stays NaN."""
    if shard.group is None:
        return values
    return torch.where(statistics.largest == -torch.inf, otherwise, values)
