"""Candidate scoring as two Triton kernels, one program per row: the logits are read once forward, and once backward.

What they leave to the caller is the algebra on ``[T]`` and ``[T, 1+K]``, with the tensor-parallel reductions.
"""

from __future__ import annotations  # the kernels' signatures name Triton's types, also where it is absent

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles_sc.loss.scoring_kernel import RowStatistics
from miles_sc.loss.vocabulary import VocabularyShard

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # CPU builds of torch bring none
    triton, jit = None, lambda kernel: kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# 16 columns per thread: no spills, and programs enough per processor to keep its memory busy (3 with entropy, else 5; 8 backward)
BLOCK_COLUMNS = 4096
COLUMNS_PER_WARP = 512


def is_available(logits: Tensor) -> bool:
    """Whether the kernels can score ``logits``; under Triton's interpreter (``TRITON_INTERPRET=1``) also on the CPU."""
    if triton is None or logits.dtype not in DTYPES:
        return False
    return logits.is_cuda or (logits.device.type == "cpu" and not isinstance(_statistics_kernel, triton.JITFunction))


@dataclass(frozen=True)
class TritonKernel:
    """See :class:`miles_sc.loss.scoring_kernel.ScoringKernel`."""

    shard: VocabularyShard
    temperature: float

    def statistics(self, logits: Tensor, columns: Tensor, owned: Tensor, *, with_entropy: bool) -> RowStatistics:
        width, temperature = self.shard.width, self.temperature
        found = row_statistics(logits, columns, owned, width=width, temperature=temperature, with_entropy=with_entropy)
        # -inf less -inf would be NaN, which on one rank is what a row without mass should say
        origin = found.largest if self.shard.group is None else torch.where(found.largest == -torch.inf, 0.0, found.largest)
        return replace(found, saved=(found.selected, origin))

    def write_gradient(self, gradient, logits, columns, owned, grad_selected, saved, **scales: Tensor | None) -> None:
        selected, origin = saved
        width, temperature = self.shard.width, self.temperature
        write_gradient(
            gradient, logits, columns, owned, grad_selected, selected, width=width, temperature=temperature, lse=origin, **scales
        )


def row_statistics(
    logits: Tensor, columns: Tensor, owned: Tensor, *, width: int, temperature: float, with_entropy: bool
) -> RowStatistics:
    """What log-probs and entropy are made of, in one read of the logits.

    Args:
        logits: ``[T, V/TP]`` float32, bfloat16 or float16.
        columns: integer ``[T, 1+K]``, local columns.
        owned: bool ``[T, 1+K]``, whether the column is this rank's.
        width: true columns; those from ``width`` on are padding and are not read.
        temperature: divides the logits.
        with_entropy: also form ``mean``.
    """
    logits, columns = _unit_columns(logits), _owned_columns(columns, owned)
    rows, slots = columns.shape
    largest, log_sum, mean = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    selected = torch.empty_like(columns, dtype=torch.float32)
    result = RowStatistics(largest, log_sum, selected, mean if with_entropy else None, torch.zeros_like(largest))
    if rows:
        with torch.cuda.device_of(logits):
            _statistics_kernel[rows,](
                logits, logits.stride(0), width, columns, slots, 1 / temperature,
                result.largest, result.log_sum, result.selected, result.mean,
                **_launch_options(width, slots),
            )  # fmt: skip
    return result


def write_gradient(
    gradient: Tensor,
    logits: Tensor,
    columns: Tensor,
    owned: Tensor,
    grad_selected: Tensor,
    selected: Tensor,
    *,
    width: int,
    temperature: float,
    lse: Tensor,
    scale: Tensor,
    entropy_scale: Tensor | None,
    entropy_shift: Tensor | None,
) -> None:
    """Fill ``gradient`` with ``p (scale + entropy_scale (z - entropy_shift)) + scatter(grad_selected)``, ``p = exp(z - lse)``.

    One read of the logits and one write. Deterministic: equal columns of a row are summed in their order, and each column is
    rounded to the gradient's dtype once. Padded columns get 0.

    Args:
        gradient: ``[T, V/TP]``, any floating-point dtype; may be ``logits`` itself.
        logits: as in the forward.
        columns: as in the forward.
        owned: as in the forward.
        grad_selected: ``[T, 1+K]``, already divided by the temperature, 0 where not owned.
        selected: ``[T, 1+K]`` of the forward: in place, the selected logits themselves are gone when they are needed.
        width: as in the forward.
        temperature: as in the forward.
        lse: ``[T]``, log-sum-exp of z over the whole vocabulary. Or its maximum, with ``exp(maximum - lse)`` multiplied into
            both scales: that loses nothing where the logits are large.
        scale: ``[T]``, the factor of p.
        entropy_scale: ``[T]``, None where the entropy has no gradient.
        entropy_shift: ``[T]``, None with ``entropy_scale``.
    """
    logits, columns = _unit_columns(logits), _owned_columns(columns, owned)
    out = gradient if gradient.stride(1) == 1 else torch.empty_like(gradient, memory_format=torch.contiguous_format)
    rows, slots = columns.shape
    if rows:
        with torch.cuda.device_of(logits):
            _gradient_kernel[rows,](
                out, out.stride(0), logits, logits.stride(0), width, out.shape[1],
                columns, grad_selected.contiguous(), selected.contiguous(), slots, 1 / temperature,
                *(None if x is None else x.contiguous() for x in (lse, scale, entropy_scale, entropy_shift)),
                **_launch_options(out.shape[1], slots),
            )  # fmt: skip
    if out is not gradient:
        gradient.copy_(out)


def _unit_columns(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _owned_columns(columns: Tensor, owned: Tensor) -> Tensor:
    """-1 for the columns of other ranks."""
    return torch.where(owned, columns, -1).contiguous()


def _launch_options(columns: int, slots: int) -> dict[str, int]:
    block = min(triton.next_power_of_2(max(columns, 1)), BLOCK_COLUMNS)
    return {
        "BLOCK": block,
        "SLOTS": triton.next_power_of_2(max(slots, 1)),
        "num_warps": max(block // COLUMNS_PER_WARP, 1),
    }


@jit
def _statistics_kernel(
    logits, row_stride, width, columns, slots, inverse_temperature,
    largest_out, log_sum_out, selected_out, mean_out,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows times columns exceed 2^31
    logits += row * row_stride

    largest = -float("inf")
    lanes = tl.full([BLOCK], 0.0, tl.float32)  # sums per lane, added up at the end: pairwise, as precise as it is quick
    weighted_lanes = lanes
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits + column, mask=column < width, other=-float("inf")).to(tl.float32) * inverse_temperature
        seen, largest = largest, tl.maximum(largest, tl.max(z, 0))
        # -inf until there is mass: a distance of -inf from itself would be NaN
        origin = tl.where(largest == -float("inf"), 0.0, largest)
        moved = tl.maximum(seen - origin, -200.0)  # where exp is 0, a product with it must not become 0 times infinity
        rescale = tl.exp(moved)
        distance = z - origin
        mass = tl.exp(distance)
        if mean_out is not None:
            weighted_lanes = rescale * (weighted_lanes + moved * lanes) + mass * tl.maximum(distance, -200.0)
        lanes = rescale * lanes + mass

    total = tl.sum(lanes, 0)
    normalizer = tl.where(total == 0, 1.0, total)
    # a maximum drops NaN, the sum has kept it
    tl.store(largest_out + row, tl.where(total == total, largest, total))
    tl.store(log_sum_out + row, tl.log(normalizer))
    if mean_out is not None:
        tl.store(mean_out + row, tl.sum(weighted_lanes, 0) / normalizer)

    slot = tl.arange(0, SLOTS)
    column = tl.load(columns + row * slots + slot, mask=slot < slots, other=-1)
    z = tl.load(logits + column, mask=column >= 0, other=0.0).to(tl.float32) * inverse_temperature
    tl.store(selected_out + row * slots + slot, z, mask=slot < slots)


@jit
def _gradient_kernel(
    gradient, gradient_stride, logits, logits_stride, width, padded_width,
    columns, grad_selected, selected, slots, inverse_temperature,
    lse, scale, entropy_scale, entropy_shift,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    gradient += row * gradient_stride
    logits += row * logits_stride
    columns += row * slots
    grad_selected += row * slots
    # once: a store to the gradient might change them, for all that the compiler knows
    lse = tl.load(lse + row)
    scale = tl.load(scale + row)
    if entropy_scale is not None:
        entropy_scale = tl.load(entropy_scale + row)
        entropy_shift = tl.load(entropy_shift + row)

    for start in range(0, padded_width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits + column, mask=column < width, other=-float("inf")).to(tl.float32) * inverse_temperature
        dense = _dense_gradient(z, lse, scale, entropy_scale, entropy_shift)
        tl.store(gradient + column, tl.where(column < width, dense, 0.0), mask=column < padded_width)

    slot = tl.arange(0, SLOTS)
    column = tl.load(columns + slot, mask=slot < slots, other=-1)
    scattered = tl.full([SLOTS], 0.0, tl.float32)
    for other in range(0, slots):  # every slot gets the sum over its column, so that equal ones store the same number
        scattered += tl.where(column == tl.load(columns + other), tl.load(grad_selected + other), 0.0)
    z = tl.load(selected + row * slots + slot, mask=column >= 0, other=0.0)
    dense = _dense_gradient(z, lse, scale, entropy_scale, entropy_shift)
    tl.debug_barrier()  # other threads have stored the dense value of these columns
    tl.store(gradient + column, dense + scattered, mask=column >= 0)


@jit
def _dense_gradient(z, lse, scale, entropy_scale, entropy_shift):
    factor = scale
    if entropy_scale is not None:
        factor += entropy_scale * tl.maximum(z - entropy_shift, -200.0)  # finite where p = 0, as in the forward
    return tl.exp(z - lse) * factor
