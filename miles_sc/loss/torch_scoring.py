"""Candidate scoring in plain torch, a few rows at a time: the reference, and what CPUs and float64 use."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_sc.loss.logit_rows import LogitRows
from miles_sc.loss.scoring_kernel import RowGradient, RowStatistics
from miles_sc.loss.vocabulary import VocabularyShard, accumulation_dtype


@dataclass(frozen=True)
class TorchKernel:
    """The fused softmax of torch on row chunks that stay in the cache. See :class:`miles_sc.loss.scoring_kernel.ScoringKernel`.

    Attributes:
        rows: of a chunk.
    """

    shard: VocabularyShard
    temperature: float
    rows: int

    def statistics(self, logits: Tensor, rows: LogitRows, columns: Tensor, owned: Tensor, *, with_entropy: bool) -> RowStatistics:
        reader = _ChunkReader(logits, rows, self)
        dtype = accumulation_dtype(logits)
        selected = torch.zeros(columns.shape, dtype=dtype, device=logits.device)
        largest = torch.full(columns.shape[:1], -torch.inf, dtype=dtype, device=logits.device)
        log_unit, mass, mean = torch.zeros_like(largest), torch.ones_like(largest), torch.zeros_like(largest)
        for _, chunk, z in reader:
            p = reader.softmax(z)
            largest[chunk] = z.amax(dim=-1)
            # softmax's own log(sum exp(z - max)), read back from its largest probability
            log_unit[chunk] = -p.amax(dim=-1).log()
            # it sums 150k exponentials one after the other; a pairwise sum of its result mends the error (7e-5)
            mass[chunk] = p.sum(dim=-1)
            selected[chunk] = torch.where(owned[chunk], z.gather(1, columns[chunk]), 0.0)
            if with_entropy:
                mean[chunk] = _expectation(p, z - largest[chunk, None])
        return RowStatistics(largest, log_unit + mass.log(), selected, mean / mass if with_entropy else None, log_unit)

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
        width = self.shard.width
        out[:, width:] = 0
        reader = _ChunkReader(logits, rows, self)
        # where the gradient can hold it, p is computed in its final place
        direct = out is not logits and out.dtype == upstream.scale.dtype and width == logits.shape[1]
        for place, chunk, z in reader:
            p = reader.softmax(z, out=out[place] if direct else None)
            factor = upstream.scale[chunk, None]
            if upstream.entropy_scale is not None:
                distance = torch.where(p > 0, z, 0.0) - upstream.entropy_shift[chunk, None]
                factor = factor + upstream.entropy_scale[chunk, None] * distance
            p.mul_(factor).scatter_add_(1, columns[chunk], upstream.selected[chunk])
            if not direct:
                out[place, :width] = p


class _ChunkReader:
    """Row chunks of the true columns as ``logits / temperature`` in the accumulation dtype, through one reused buffer."""

    def __init__(self, logits: Tensor, rows: LogitRows, kernel: TorchKernel) -> None:
        self.logits, self.rows, self.step = logits, rows, kernel.rows
        self.width, self.temperature = kernel.shard.width, kernel.temperature
        self.one_of_several = kernel.shard.group is not None
        dtype = accumulation_dtype(logits)
        buffer = (min(self.step, logits.shape[0]), self.width)
        self.copies = logits.dtype != dtype or self.temperature != 1.0 or self.width != logits.shape[1]
        self._scaled = logits.new_empty(buffer if self.copies else (0, 0), dtype=dtype)
        self._softmax = logits.new_empty(buffer, dtype=dtype)

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Of each chunk: where it lies in the logits, where it stands among the scored rows, and its values."""
        for run, part in self.rows if self.width else ():
            for start in range(run.start, run.stop, self.step):
                place = slice(start, min(start + self.step, run.stop))
                moved = part.start - run.start
                yield place, slice(place.start + moved, place.stop + moved), self._scale(self.logits[place, : self.width])

    def _scale(self, chunk: Tensor) -> Tensor:
        if not self.copies:
            return chunk
        scaled = self._scaled[: chunk.shape[0]]
        scaled.copy_(chunk)
        return scaled if self.temperature == 1.0 else scaled.div_(self.temperature)

    def softmax(self, scaled: Tensor, out: Tensor | None = None) -> Tensor:
        """The fused softmax of a chunk, in ``out`` or in a buffer that the next call overwrites."""
        p = torch.softmax(scaled, dim=-1, out=self._softmax[: scaled.shape[0]] if out is None else out)
        if self.one_of_several:
            # a row may be masked on this rank's columns alone: it has no mass here, where softmax says NaN
            p.masked_fill_(scaled.amax(dim=-1, keepdim=True) == -torch.inf, 0.0)
        return p


def _expectation(p: Tensor, z: Tensor) -> Tensor:
    # a masked column has p = 0 and z = -inf; their product is 0 here
    return (p * torch.where(p > 0, z, 0.0)).sum(dim=-1)
