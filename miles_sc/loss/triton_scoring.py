"""Candidate scoring as two Triton kernels, one program per row: the logits are read once forward, and once backward.

What they leave to the caller is the algebra on ``[T]`` and ``[T, 1+K]``, with the tensor-parallel reductions.
"""

from __future__ import annotations  # the kernels' signatures name Triton's types, also where it is absent

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_sc.loss.logit_rows import LogitRows
from miles_sc.loss.scoring_kernel import RowGradient, RowStatistics
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
    """Whether the kernels can score ``logits``."""
    return triton is not None and logits.dtype in DTYPES


@dataclass(frozen=True)
class TritonKernel:
    """See :class:`miles_sc.loss.scoring_kernel.ScoringKernel`; float32 inside, deterministic.

    Backward adds up the upstream of equal ids before it rounds, and rounds each column once.
    """

    shard: VocabularyShard
    temperature: float

    def statistics(self, logits: Tensor, rows: LogitRows, columns: Tensor, owned: Tensor, *, with_entropy: bool) -> RowStatistics:
        logits, columns, places = _unit_columns(logits), _owned_columns(columns, owned), rows.places(logits.device)
        count, slots = columns.shape
        largest, log_sum, mean = torch.empty(3, count, dtype=torch.float32, device=logits.device)
        selected = torch.empty_like(columns, dtype=torch.float32)
        if count:
            with torch.cuda.device_of(logits):
                _statistics_kernel[count,](
                    logits, logits.stride(0), places, self.shard.width, columns, slots, 1 / self.temperature,
                    largest, log_sum, selected, mean if with_entropy else None,
                    **_launch_options(self.shard.width, slots),
                )  # fmt: skip
        origin = largest
        if self.shard.group is not None:  # a row without mass here has some elsewhere; on one rank it is NaN, and stays it
            origin = torch.where(largest == -torch.inf, 0.0, largest)
        # in place, the selected logits themselves are gone when backward needs them; the caller's are summed over ranks
        saved = (selected.clone(), origin, places)
        return RowStatistics(largest, log_sum, selected, mean if with_entropy else None, torch.zeros_like(largest), saved)

    def write_gradient(
        self,
        out: Tensor,
        logits: Tensor,
        rows: LogitRows,
        columns: Tensor,
        owned: Tensor,
        upstream: RowGradient,
        saved: tuple[Tensor | None, ...],
    ) -> None:
        selected, origin, places = saved
        rows_of = (origin, upstream.scale, upstream.entropy_scale, upstream.entropy_shift)
        unit, columns = _unit_columns(logits), _owned_columns(columns, owned)
        target = out if out.stride(1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        count, slots = columns.shape
        if count:
            with torch.cuda.device_of(unit):
                _gradient_kernel[count,](
                    target, target.stride(0), unit, unit.stride(0), places, self.shard.width, target.shape[1],
                    columns, upstream.selected.contiguous(), selected, slots, 1 / self.temperature,
                    *(None if x is None else x.contiguous() for x in rows_of),
                    **_launch_options(target.shape[1], slots),
                )  # fmt: skip
        if target is not out:
            out.copy_(target)
        elif out is logits:
            # a kernel's store is invisible to autograd; whoever still reads the logits must be told
            torch.autograd.graph.increment_version(logits)


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
def _place(places, row):
    place = row
    if places is not None:
        place = tl.load(places + row)
    return place


@jit
def _statistics_kernel(
    logits, row_stride, places, width, columns, slots, inverse_temperature,
    largest_out, log_sum_out, selected_out, mean_out,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows times columns exceed 2^31
    logits += _place(places, row) * row_stride

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
    gradient, gradient_stride, logits, logits_stride, places, width, padded_width,
    columns, grad_selected, selected, slots, inverse_temperature,
    origin, scale, entropy_scale, entropy_shift,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = _place(places, row)
    gradient += place * gradient_stride
    logits += place * logits_stride
    columns += row * slots
    grad_selected += row * slots
    # once: a store to the gradient might change them, for all that the compiler knows
    origin = tl.load(origin + row)
    scale = tl.load(scale + row)
    if entropy_scale is not None:
        entropy_scale = tl.load(entropy_scale + row)
        entropy_shift = tl.load(entropy_shift + row)

    for start in range(0, padded_width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits + column, mask=column < width, other=-float("inf")).to(tl.float32) * inverse_temperature
        dense = _dense_gradient(z, origin, scale, entropy_scale, entropy_shift)
        tl.store(gradient + column, tl.where(column < width, dense, 0.0), mask=column < padded_width)

    slot = tl.arange(0, SLOTS)
    column = tl.load(columns + slot, mask=slot < slots, other=-1)
    scattered = tl.full([SLOTS], 0.0, tl.float32)
    for other in range(0, slots):  # every slot gets the sum over its column, so that equal ones store the same number
        scattered += tl.where(column == tl.load(columns + other), tl.load(grad_selected + other), 0.0)
    z = tl.load(selected + row * slots + slot, mask=column >= 0, other=0.0)
    dense = _dense_gradient(z, origin, scale, entropy_scale, entropy_shift)
    tl.debug_barrier()  # other threads have stored the dense value of these columns
    tl.store(gradient + column, dense + scattered, mask=column >= 0)


@jit
def _dense_gradient(z, origin, scale, entropy_scale, entropy_shift):
    factor = scale
    if entropy_scale is not None:
        factor += entropy_scale * tl.maximum(z - entropy_shift, -200.0)  # finite where p = 0, as in the forward
    return tl.exp(z - origin) * factor
