"""The support that filtered sampling drew each token from, as one compressed-rows value."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SamplingSupport:
    """Token ids of every row's support, one after the other.

    Attributes:
        ids: int32 ``[total]``.
        offsets: int64 ``[rows + 1]``; row r is ``ids[offsets[r]:offsets[r + 1]]``. No row is empty.
    """

    ids: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.int32:
            raise ValueError(f"support ids are {self.ids.dtype} {self.ids.shape}: give int32 [total]")
        if self.offsets.ndim != 1 or self.offsets.dtype != np.int64 or self.offsets.size == 0:
            raise ValueError(f"support offsets are {self.offsets.dtype} {self.offsets.shape}: give int64 [rows + 1]")
        if self.offsets[0] != 0 or self.offsets[-1] != self.ids.size:
            raise ValueError(
                f"support offsets run from {self.offsets[0]} to {self.offsets[-1]}: they must run from 0 to {self.ids.size}"
            )
        empty = np.flatnonzero(np.diff(self.offsets) < 1)
        if empty.size:
            raise ValueError(f"row {empty[0]} of the sampling support is empty: a token was drawn from at least one id")

    def __len__(self) -> int:
        return self.offsets.size - 1

    @property
    def lengths(self) -> np.ndarray:
        """Ids per row, int64 ``[rows]``."""
        return np.diff(self.offsets)

    @classmethod
    def empty(cls) -> "SamplingSupport":
        return cls(np.empty(0, np.int32), np.zeros(1, np.int64))

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> "SamplingSupport":
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        ids = np.concatenate([np.asarray(row, np.int32) for row in rows]) if len(rows) else np.empty(0, np.int32)
        return cls(ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))

    @classmethod
    def singletons(cls, token_ids: Sequence[int]) -> "SamplingSupport":
        """Rows that hold just their own token: observations, which nobody sampled."""
        return cls(np.asarray(token_ids, np.int32).reshape(-1), np.arange(len(token_ids) + 1, dtype=np.int64))

    @classmethod
    def concatenate(cls, parts: "Sequence[SamplingSupport]") -> "SamplingSupport":
        starts = np.concatenate([[0], np.cumsum([part.ids.size for part in parts])])
        offsets = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
        return cls(
            np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)]),
            np.concatenate([np.zeros(1, np.int64), *offsets]),
        )

    def trim(self, rows: int) -> "SamplingSupport":
        """Without the last ``rows`` rows."""
        if not 0 <= rows <= len(self):
            raise ValueError(f"trim({rows}) of a support of {len(self)} rows: give 0..{len(self)}")
        offsets = self.offsets[: len(self) - rows + 1]
        return SamplingSupport(self.ids[: offsets[-1]], offsets)

    def padded(self, width: int) -> np.ndarray:
        """Dense int32 ``[rows, width]``, -1 in unused slots."""
        return self.spread(self.ids, width, -1)

    def spread(self, values: np.ndarray, width: int, unused: float) -> np.ndarray:
        """Dense ``[rows, width]`` of one value per id, ``[total]``, with ``unused`` in the slots behind each row's."""
        lengths = self.lengths
        if len(self) and lengths.max() > width:
            row = int(lengths.argmax())
            raise ValueError(
                f"row {row} of the sampling support holds {lengths[row]} ids and only {width} are recorded: "
                f"raise --rollout-top-logprobs-num to at least {lengths[row]}"
            )
        if values.size == len(self) * width:  # every row is full, as under a top-k filter alone
            return values.reshape(len(self), width).copy()
        dense = np.full((len(self), width), unused, values.dtype)
        dense[np.arange(width, dtype=np.int32) < lengths.astype(np.int32)[:, None]] = values
        return dense
