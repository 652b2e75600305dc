"""Which rows of the logits are scored: runs that are read, and get their gradient, where they lie."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitRows:
    """T rows of logits ``[S, V]``. A response is one run; under context parallelism it is two at the most.

    Attributes:
        runs: slices of the S rows, ascending; one, perhaps empty, where there is nothing to score.
        length: S.
    """

    runs: tuple[slice, ...]
    length: int

    @classmethod
    def of(cls, rows: Sequence[int] | np.ndarray | None, length: int) -> "LogitRows":
        """
        Args:
            rows: ``[T]``, ascending; None for all.
            length: S.

        Raises:
            ValueError: rows that are no ascending whole numbers of 0..S-1.
        """
        if rows is None:
            return cls((slice(0, length),), length)
        if isinstance(rows, Tensor):
            raise ValueError("rows is a tensor: give a numpy array or a list, which nobody waits for the device to read")
        wanted = np.asarray(rows)
        if not wanted.size:
            return cls((slice(0, 0),), length)
        if wanted.ndim != 1 or not np.issubdtype(wanted.dtype, np.integer):
            raise ValueError(f"rows {wanted.shape} of {wanted.dtype}: give whole numbers [T]")
        wanted = wanted.astype(np.int64)  # steps of unsigned ones would wrap
        steps = np.diff(wanted)
        if (steps <= 0).any() or wanted[0] < 0 or wanted[-1] >= length:
            raise ValueError(f"rows {wanted.min()}..{wanted.max()} of {length} rows of logits: give them once each, ascending")
        edges = np.flatnonzero(steps > 1)
        first, last = wanted[[0, *(edges + 1)]].tolist(), wanted[[*edges, -1]].tolist()
        return cls(tuple(slice(a, b + 1) for a, b in zip(first, last, strict=True)), length)

    def __len__(self) -> int:
        return sum(run.stop - run.start for run in self.runs)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Each run, and where its scores stand among the T."""
        done = 0
        for run in self.runs:
            stop = done + run.stop - run.start
            yield run, slice(done, stop)
            done = stop

    def places(self, device: torch.device) -> Tensor | None:
        """int64 ``[T]`` on the device, one transfer; None where they are all rows, in order."""
        if self.runs == (slice(0, self.length),):
            return None
        return torch.from_numpy(np.concatenate([np.arange(run.start, run.stop) for run in self.runs])).to(device)

    def others(self) -> Iterator[slice]:
        """The rows between the runs, which nobody scores."""
        stops, starts = (0, *(run.stop for run in self.runs)), (*(run.start for run in self.runs), self.length)
        yield from (slice(a, b) for a, b in zip(stops, starts, strict=True) if a < b)
