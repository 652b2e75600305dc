"""Log-probs of a few selected tokens per row of logits, without a second tensor of the logits' size.

An explicit autograd Function on this rank's columns. Since the loss is replicated over the tensor-parallel group, forward
reduces and backward reduces nothing.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from miles_sc.loss.vocabulary import VocabularyShard, accumulation_dtype, check_scoring_inputs, chunk_rows, logits_shard


def selected_log_probs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk_size: int = -1,
    inplace_backward: bool = False,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probs of selected tokens under ``softmax(logits / temperature)`` over the true vocabulary.

    Saved for backward: the live logits, the ids and one scalar per row (two more with entropy).

    Args:
        logits: ``[T, V/TP]``, this rank's columns.
        token_ids: integer ``[T, 1+K]`` of global ids, column 0 the sampled token. -1 gives 0 and no gradient; an id may
            stand twice.
        group: tensor-parallel group; forward makes one MAX and two SUM reductions of per-row floats, backward none.
        vocab_size: true vocabulary; columns beyond it (Megatron's padding) are excluded and get no gradient.
        temperature: the sampler's.
        chunk_size: rows scored at a time; -1 chooses what suits the device.
        inplace_backward: write the gradient over the logits. They must not be read after that: not with a recomputed loss.
        with_entropy: also return the entropy of the same distribution.

    Returns:
        float32 ``[T, 1+K]`` (float64 for float64 logits); with entropy ``(log_probs, entropy [T])``.

    Raises:
        ValueError: shapes, vocabulary, temperature, chunk size; ids out of range (on the CPU, where looking costs no sync).
    """
    shard = logits_shard(logits, group, vocab_size)
    check_scoring_inputs(token_ids, len(logits), shard.vocab_size, temperature=temperature, chunk_size=chunk_size)
    rows = chunk_rows(logits) if chunk_size == -1 else chunk_size
    log_probs, entropy = _SelectedLogProbs.apply(
        logits, token_ids.long(), shard, float(temperature), rows, inplace_backward, with_entropy
    )
    return (log_probs, entropy) if with_entropy else log_probs


class _ChunkReader:
    """Row chunks of the true columns as ``logits / temperature`` in the accumulation dtype, through one reused buffer."""

    def __init__(self, logits: Tensor, shard: VocabularyShard, temperature: float, rows: int) -> None:
        self.logits, self.width, self.temperature, self.rows = logits, shard.width, temperature, rows
        self.one_of_several = shard.group is not None
        dtype = accumulation_dtype(logits)
        buffer = (min(rows, logits.shape[0]), shard.width)
        self.copies = logits.dtype != dtype or temperature != 1.0 or shard.width != logits.shape[1]
        self._scaled = logits.new_empty(buffer if self.copies else (0, 0), dtype=dtype)
        self._softmax = logits.new_empty(buffer, dtype=dtype)

    def __iter__(self):
        for start in range(0, self.logits.shape[0], self.rows):
            rows = slice(start, min(start + self.rows, self.logits.shape[0]))
            yield rows, self._scale(self.logits[rows, : self.width])

    def _scale(self, chunk: Tensor) -> Tensor:
        if not self.copies:
            return chunk
        scaled = self._scaled[: chunk.shape[0]]
        scaled.copy_(chunk)
        return scaled if self.temperature == 1.0 else scaled.div_(self.temperature)

    def softmax(self, scaled: Tensor, out: Tensor | None = None) -> Tensor:
        """The fused kernel's softmax of a chunk, in ``out`` or in a buffer that the next call overwrites."""
        p = torch.softmax(scaled, dim=-1, out=self._softmax[: scaled.shape[0]] if out is None else out)
        if self.one_of_several:
            # a row may be masked on this rank's columns alone: it has no mass here, where the kernel says NaN
            p.masked_fill_(scaled.amax(dim=-1, keepdim=True) == -torch.inf, 0.0)
        return p


class _SelectedLogProbs(torch.autograd.Function):
    """``log p = z - logsumexp(z)`` for ids ``[T, 1+K]`` and ``z = logits[T, V/TP] / temperature``.

    Forward reduces over the group: MAX and SUM of ``[T]``, SUM of ``[T, 1+K]``, with entropy SUM of ``[T]`` more.
    Backward, on the local columns: ``dz = scatter(g) - (sum g) p - h p (log p + H)``, where g and h are the upstream
    gradients of log-probs and entropy.
    """

    @staticmethod
    def forward(ctx, logits, token_ids, shard, temperature, rows, inplace_backward, with_entropy):
        columns, owned = shard.local(token_ids)
        reader = _ChunkReader(logits, shard, temperature, rows)
        dtype = accumulation_dtype(logits)
        selected = torch.zeros(token_ids.shape, dtype=dtype, device=logits.device)
        largest = torch.full(logits.shape[:1], -torch.inf, dtype=dtype, device=logits.device)
        kernel_log_sum, mass, mean = torch.zeros_like(largest), torch.ones_like(largest), torch.zeros_like(largest)
        if shard.width:
            for chunk, z in reader:
                p = reader.softmax(z)
                largest[chunk] = z.amax(dim=-1)
                # the kernel's log(sum exp(z - max)), read back from its largest probability
                kernel_log_sum[chunk] = -p.amax(dim=-1).log()
                # it sums 150k exponentials one after the other; a pairwise sum of its result mends the error (7e-5)
                mass[chunk] = p.sum(dim=-1)
                selected[chunk] = torch.where(owned[chunk], z.gather(1, columns[chunk]), 0.0)
                if with_entropy:
                    mean[chunk] = _expectation(p, z - largest[chunk, None])
        # kept apart from the maximum to the end: their sum would be rounded at the logits' own scale
        top, log_sum = _combine(largest, kernel_log_sum, mass, shard)
        log_probs = torch.where(token_ids >= 0, (shard.sum(selected) - top[:, None]) - log_sum[:, None], 0.0)
        # an id that no rank owns: refused on the CPU before, made loud where looking would wait for the device
        log_probs.masked_fill_(token_ids >= shard.vocab_size, torch.nan)

        below_top = torch.where(largest == -torch.inf, largest, largest - top)
        kernel_to_true = (below_top + kernel_log_sum - log_sum).exp()  # from the kernel's softmax to p of the whole vocabulary
        if shard.group is not None:
            kernel_to_true = torch.where(largest == -torch.inf, 0.0, kernel_to_true)
        saved, entropy = [logits, token_ids, kernel_to_true], log_probs.new_zeros(0)
        if with_entropy:
            here = torch.where(largest == -torch.inf, 0.0, kernel_to_true * (mean + below_top * mass))
            entropy = log_sum - shard.sum(here)
            saved += [top + log_sum, entropy]
        else:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(*saved)
        ctx.settings = (shard, temperature, rows, inplace_backward)
        ctx.set_materialize_grads(False)  # an entropy that is only observed costs nothing in backward
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        logits, token_ids, kernel_to_true, *lse_and_entropy = ctx.saved_tensors
        shard, temperature, rows, inplace_backward = ctx.settings
        if grad_log_probs is None:
            grad_log_probs = kernel_to_true.new_zeros(token_ids.shape)
        gradient = logits if inplace_backward else torch.empty_like(logits, memory_format=torch.contiguous_format)
        gradient[:, shard.width :] = 0
        columns, owned = shard.local(token_ids)
        scattered = torch.where(owned, grad_log_probs, 0.0) / temperature
        total = torch.where(token_ids >= 0, grad_log_probs, 0.0).sum(dim=1)
        scale = -total * kernel_to_true / temperature
        reader = _ChunkReader(logits, shard, temperature, rows)
        # where the gradient can hold it, p is computed in its final place
        direct = not inplace_backward and gradient.dtype == kernel_to_true.dtype and shard.width == logits.shape[1]
        if shard.width:
            for chunk, z in reader:
                p = reader.softmax(z, out=gradient[chunk] if direct else None)
                if grad_entropy is not None:
                    p.mul_(_entropy_factor(p, z, scale, grad_entropy, kernel_to_true, *lse_and_entropy, temperature, chunk))
                else:
                    p.mul_(scale[chunk, None])
                p.scatter_add_(1, columns[chunk], scattered[chunk])
                if not direct:
                    gradient[chunk, : shard.width] = p
        return gradient, None, None, None, None, None, None


def _combine(largest: Tensor, kernel_log_sum: Tensor, mass: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """The largest logit ``[T]`` of the whole vocabulary, and ``log(sum exp(z - largest))`` over it."""
    local = kernel_log_sum + mass.log()
    if shard.group is None:
        return largest, local
    top = shard.max(largest.clone())
    here = torch.where(largest == -torch.inf, 0.0, (largest - top + local).exp())
    return top, shard.sum(here).log()


def _expectation(p: Tensor, z: Tensor) -> Tensor:
    # a masked column has p = 0 and z = -inf; their product is 0 here
    return (p * torch.where(p > 0, z, 0.0)).sum(dim=-1)


def _entropy_factor(p, z, scale, grad_entropy, kernel_to_true, lse, entropy, temperature, chunk) -> Tensor:
    """What the kernel's p is multiplied by where the entropy has a gradient too."""
    log_p_plus_entropy = torch.where(p > 0, z, 0.0) - (lse - entropy)[chunk, None]
    return scale[chunk, None] - (grad_entropy * kernel_to_true / temperature)[chunk, None] * log_p_plus_entropy
