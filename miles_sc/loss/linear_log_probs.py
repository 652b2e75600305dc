"""Log-probs of a few selected tokens per row straight from hidden states and the output weight, without the logits.

An explicit autograd Function that walks tiles of logits, a block of rows by a block of vocabulary columns. Backward computes
every tile once more: four matmuls where a head with kept logits needs three.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from miles_sc.loss.vocabulary import VocabularyShard, accumulation_dtype, check_matrix, check_scoring_inputs

# (rows, columns) of a tile. On a CPU the tile and its block of weights stay in the cache, and the matmul runs at full speed;
# an accelerator wants larger launches.
CPU_TILE = (512, 2048)
ACCELERATOR_TILE = (4096, 16384)


def linear_selected_log_probs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk_size: int = -1,
) -> Tensor:
    """:func:`miles_sc.selected_log_probs` of ``hidden @ weight.T``, values and gradients, where ``[T, V]`` never exists.

    The logits are rounded to the model's dtype, as its own head would, then scored in float32. Saved for backward: hidden,
    weight, ids and two scalars per row. Beside the gradients (hidden's is summed in float32) and a few ``[T, 1+K]`` the extra
    memory is one tile's, whatever T and V.

    Args:
        hidden: ``[T, D]``, the same on every rank of ``group``.
        weight: ``[V/TP, D]``, this rank's rows of the output layer; of hidden's dtype and device.
        token_ids: integer ``[T, 1+K]`` of global ids, column 0 the sampled token. -1 gives 0 and no gradient; an id may
            stand twice.
        group: tensor-parallel group. Forward makes one MAX ``[T]`` and two SUM ``[T]``, ``[T, 1+K]`` reductions; backward
            one SUM ``[T, D]`` where hidden needs a gradient, which is then whole on every rank. The weight's is local. With
            context parallelism the rows are local and nothing crosses that group.
        vocab_size: true vocabulary; columns beyond it (Megatron's padding) are excluded and their weights get no gradient.
        temperature: the sampler's.
        chunk_size: rows of a tile; -1 chooses what suits the device.

    Returns:
        float32 ``[T, 1+K]`` (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes, vocabulary, temperature, chunk size; ids out of range (on the CPU, where looking costs no
            sync).
    """
    _check_layer(hidden, weight)
    shard = VocabularyShard.of(weight.shape[0], group=group, vocab_size=vocab_size)
    check_scoring_inputs(token_ids, len(hidden), shard.vocab_size, temperature=temperature, chunk_size=chunk_size)
    rows, columns = CPU_TILE if hidden.device.type == "cpu" else ACCELERATOR_TILE
    tile = (rows if chunk_size == -1 else chunk_size, columns)
    return _LinearSelectedLogProbs.apply(hidden, weight, token_ids.long(), shard, float(temperature), tile)


def _check_layer(hidden: Tensor, weight: Tensor) -> None:
    check_matrix("hidden", hidden, "[T, D]")
    check_matrix("weight", weight, "[V, D]")
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} differ in D: give [T, D] and [V, D], the weight as "
            "torch.nn.Linear keeps it"
        )
    if hidden.dtype != weight.dtype or hidden.device != weight.device:
        raise ValueError(
            f"hidden is {hidden.dtype} on {hidden.device}, weight {weight.dtype} on {weight.device}: cast both to the dtype "
            "that the model's head computes in, on one device"
        )


class _LogitTiles:
    """``hidden @ weight.T / temperature`` tile by tile in the accumulation dtype; a tile is overwritten by the next."""

    def __init__(self, hidden: Tensor, weight: Tensor, shard: VocabularyShard, temperature: float, tile: tuple[int, int]) -> None:
        self.hidden, self.weight, self.shard, self.temperature = hidden, weight, shard, temperature
        self.row_blocks, self.column_blocks = _blocks(len(hidden), tile[0]), _blocks(shard.width, tile[1])
        size = min(tile[0], len(hidden)) * min(tile[1], shard.width)
        self._logits = hidden.new_empty(size)
        self._scaled = self._logits.to(accumulation_dtype(hidden))  # the same buffer where the dtypes are the same

    def read(self, rows: slice, columns: slice) -> Tensor:
        hidden, weight = self.hidden[rows], self.weight[columns]
        size = len(hidden) * len(weight)
        logits, scaled = (x[:size].view(len(hidden), -1) for x in (self._logits, self._scaled))
        torch.mm(hidden, weight.T, out=logits)
        if scaled.dtype != logits.dtype:
            scaled.copy_(logits)
        return scaled if self.temperature == 1.0 else scaled.div_(self.temperature)

    def local(self, token_ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """As :meth:`VocabularyShard.local`, within the columns of a tile."""
        part = replace(self.shard, start=self.shard.start + columns.start, width=columns.stop - columns.start)
        return part.local(token_ids)


def _blocks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


class _LinearSelectedLogProbs(torch.autograd.Function):
    """``log p = z - logsumexp(z)`` for ids ``[T, 1+K]`` and ``z = hidden[T, D] @ weight[V/TP, D].T / temperature``.

    Forward reduces over the group: MAX and SUM of ``[T]``, SUM of ``[T, 1+K]``. Backward, with the upstream gradient g:
    ``dz = scatter(g) - (sum g) p``, ``dweight = dz.T @ hidden`` and the SUM over the group of ``dhidden = dz @ weight``.
    """

    @staticmethod
    def forward(ctx, hidden, weight, token_ids, shard, temperature, tile):
        tiles = _LogitTiles(hidden, weight, shard, temperature, tile)
        dtype = accumulation_dtype(hidden)
        selected = torch.zeros(token_ids.shape, dtype=dtype, device=hidden.device)
        largest = torch.full(hidden.shape[:1], -torch.inf, dtype=dtype, device=hidden.device)
        mass = torch.zeros_like(largest)
        for columns in tiles.column_blocks:
            for rows in tiles.row_blocks:
                z = tiles.read(rows, columns)
                places, owned = tiles.local(token_ids[rows], columns)
                selected[rows] += torch.where(owned, z.gather(1, places), 0.0)
                _add_to_softmax(z, largest[rows], mass[rows])
        top, log_sum = shard.combine(largest, mass.log())
        log_probs = shard.log_probs(selected, top, log_sum, token_ids)
        ctx.save_for_backward(hidden, weight, token_ids, top, (-log_sum).exp())
        ctx.settings = (shard, temperature, tile)
        return log_probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_log_probs):
        hidden, weight, token_ids, top, to_p = ctx.saved_tensors
        shard, temperature, tile = ctx.settings
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        grad = torch.where(token_ids >= 0, grad_log_probs, 0.0) / temperature
        dtype, total = to_p.dtype, grad.sum(dim=1)
        tiles = _LogitTiles(hidden, weight, shard, temperature, tile)
        hidden_gradient = torch.zeros_like(hidden, dtype=dtype) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, memory_format=torch.contiguous_format) if wants_weight else None
        for columns in tiles.column_blocks:
            # zeros in the accumulation dtype: of narrower weights a copy, which is rounded once, after all rows
            block = weight_gradient[columns].to(dtype) if wants_weight else None
            for rows in tiles.row_blocks:
                z = tiles.read(rows, columns)
                places, owned = tiles.local(token_ids[rows], columns)
                z.sub_(top[rows, None]).exp_().mul_(-(total * to_p)[rows, None])
                z.scatter_add_(1, places, torch.where(owned, grad[rows], 0.0))
                dz = z.to(hidden.dtype)
                if wants_hidden:
                    _add_product(hidden_gradient[rows], dz, weight[columns])
                if wants_weight:
                    _add_product(block, dz.T, hidden[rows])
            if wants_weight and block.dtype != weight.dtype:
                weight_gradient[columns] = block
        if wants_hidden:
            hidden_gradient = shard.sum(hidden_gradient).to(hidden.dtype)
        return hidden_gradient, weight_gradient, None, None, None, None


def _add_to_softmax(z: Tensor, largest: Tensor, mass: Tensor) -> None:
    """Bring ``mass = sum exp(z - largest)`` up to date with another tile, in place; the tile is used up."""
    top = torch.maximum(largest, z.amax(dim=1))
    # a row may hold nothing but -inf so far: it has no mass, where -inf - -inf would say NaN
    reference = torch.where(top == -torch.inf, 0.0, top)
    mass.mul_((largest - reference).exp()).add_(z.sub_(reference[:, None]).exp_().sum(dim=1))
    largest.copy_(top)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``; a product of narrower factors is rounded to their dtype once, the sum stays float32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
