"""The context-parallel layouts as index maps: which rank holds which token, and which response rows it scores.

A map is computed once per micro-batch, from lengths alone. Tokens, masks, candidates, log-probs and advantages all go through
it, so that they cannot disagree; scoring and the estimator run on the rows where they lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class ContextLayout:
    """How the samples of a micro-batch lie over a context-parallel group.

    Attributes:
        qkv_format: ``thd`` packs samples one after the other into one row, ``bshd`` pads each to a row of its own.
        allgather: a rank holds one contiguous part; otherwise chunks ``r`` and ``2 size - 1 - r`` of ``2 size`` (zigzag),
            which evens out the work of causal attention.
        size: ranks in the group.
    """

    qkv_format: str = "bshd"
    allgather: bool = False
    size: int = 1

    def __post_init__(self) -> None:
        if self.qkv_format not in ("thd", "bshd"):
            raise ValueError(f"--qkv-format {self.qkv_format}: choose thd or bshd")
        if self.size < 1:
            raise ValueError(f"--context-parallel-size {self.size}: set at least 1")

    @property
    def packed(self) -> bool:
        return self.qkv_format == "thd"

    @property
    def parts(self) -> int:
        """Into how many equal parts a row is cut; it is padded to a multiple of them."""
        return self.size if self.allgather or self.size == 1 else 2 * self.size

    def padded(self, length: int) -> int:
        """Length of a row that ``length`` tokens need."""
        return -(-max(length, 1) // self.parts) * self.parts

    def tokens_per_rank(self, lengths: Sequence[int]) -> int:
        """Slots on each rank of a micro-batch of samples of these lengths."""
        if not lengths:
            return self.padded(1) // self.size  # one row of padding
        if not self.packed:
            return len(lengths) * self.padded(max(lengths)) // self.size
        if self.allgather:
            return self.padded(sum(lengths)) // self.size
        return sum(self.padded(length) for length in lengths) // self.size

    def positions(self, padded_length: int, rank: int) -> np.ndarray:
        """Positions of a padded row that a rank holds, int64, ascending."""
        parts = np.arange(padded_length).reshape(self.parts, -1)
        mine = [rank] if self.parts == self.size else [rank, self.parts - 1 - rank]
        return parts[mine].reshape(-1)


ONE_RANK = ContextLayout()


@dataclass(frozen=True)
class ContextMap:
    """What one rank holds of a micro-batch, as ``[B, S]`` slots (B = 1 where samples are packed).

    Attributes:
        samples: int64 ``[B, S]``, whose token a slot is, its own padding included; -1 in padding of nobody.
        positions: int64 ``[B, S]``, the token's place in its sample.
        total_lengths, response_lengths: of every sample of the micro-batch, on whatever rank.
    """

    samples: np.ndarray
    positions: np.ndarray
    total_lengths: np.ndarray
    response_lengths: np.ndarray

    @cached_property
    def tokens(self) -> np.ndarray:
        """int64 ``[B, S]``: place of each slot's token in the samples' tokens joined one after the other; -1 in padding."""
        starts = _starts(self.total_lengths)
        return np.where(self._is_token, starts[self.samples] + self.positions, -1)

    @cached_property
    def rows(self) -> np.ndarray:
        """int64 ``[T]``: slots of the flattened ``[B * S]`` whose logits predict a response token, ascending."""
        return np.flatnonzero(self._scores_response)

    @cached_property
    def response_rows(self) -> np.ndarray:
        """int64 ``[T]``: the response token that each of :attr:`rows` predicts, counted over all samples' responses joined."""
        samples, positions = self.samples.reshape(-1)[self.rows], self.positions.reshape(-1)[self.rows]
        # logits at position t predict token t + 1
        first = (self.total_lengths - self.response_lengths)[samples]
        return _starts(self.response_lengths)[samples] + positions + 1 - first

    def response_rows_of(self, sample: int) -> np.ndarray:
        """int64: rows of one sample's response that are scored here; all its own on a group of one rank."""
        start = _starts(self.response_lengths)[sample]
        low, high = np.searchsorted(self.response_rows, (start, start + self.response_lengths[sample]))
        return self.response_rows[low:high] - start

    def sample_and_token(self, row: int) -> tuple[int, int]:
        """Whose response one of :attr:`rows` belongs to, and which of its tokens it predicts."""
        starts, response_row = _starts(self.response_lengths), int(self.response_rows[row])
        sample = int(np.searchsorted(starts[1:], response_row, side="right"))
        return sample, response_row - int(starts[sample])

    @property
    def _is_token(self) -> np.ndarray:
        return (self.samples >= 0) & (self.positions < self._of_slot(self.total_lengths))

    @property
    def _scores_response(self) -> np.ndarray:
        predicted = self.positions + 1
        total, response = self._of_slot(self.total_lengths), self._of_slot(self.response_lengths)
        return (self.samples >= 0) & (predicted >= total - response) & (predicted < total)

    def _of_slot(self, per_sample: np.ndarray) -> np.ndarray:
        return np.append(per_sample, 0)[self.samples]  # sample -1 reads the 0


def context_map(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    layout: ContextLayout,
    *,
    rank: int = 0,
    padded_length: int | None = None,
) -> ContextMap:
    """The slots of one rank.

    ``thd``: samples one after the other; in zigzag each is padded and cut by itself, in all-gather their concatenation is.
    ``bshd``: a row per sample, padded to the longest; every row is cut alike.
    No samples at all give one row of padding, so that a rank without data still takes part in every collective.

    Args:
        total_lengths: tokens of each sample, prompt and response.
        response_lengths: response tokens of each; may be 0.
        rank: in the context-parallel group.
        padded_length: pad what is cut as a whole (a ``bshd`` row, the concatenation of packed all-gather) at least this far; a
            host may pad further than its layout needs.

    Raises:
        ValueError: lengths that do not match, a response without a prompt token before it, a rank outside the group.
    """
    if not 0 <= rank < layout.size:
        raise ValueError(f"rank {rank} in a context-parallel group of {layout.size}: give the rank in that group, from 0")
    total, response = _whole_numbers("total_lengths", total_lengths), _whole_numbers("response_lengths", response_lengths)
    _check_lengths(total, response)
    if layout.packed:
        samples, positions = _packed_slots(total, layout, rank, padded_length or 0)
    else:
        width = layout.padded(max(int(total.max(initial=1)), padded_length or 0))
        rows = np.arange(len(total)) if len(total) else np.array([-1])
        samples, positions = (grid.copy() for grid in np.broadcast_arrays(rows[:, None], layout.positions(width, rank)[None]))
    return ContextMap(samples, positions, total, response)


def _packed_slots(total: np.ndarray, layout: ContextLayout, rank: int, padded_length: int) -> tuple[np.ndarray, np.ndarray]:
    if not layout.allgather:
        parts = [layout.positions(layout.padded(length), rank) for length in total]
        samples = np.repeat(np.arange(len(total)), [len(part) for part in parts])
        positions = np.concatenate(parts) if parts else np.empty(0, np.int64)
        if not len(positions):
            positions = layout.positions(layout.padded(1), rank)
            samples = np.full(len(positions), -1)
        return samples[None], positions[None]
    length = int(total.sum())
    padding = layout.padded(max(length, padded_length)) - length
    samples = np.concatenate([np.repeat(np.arange(len(total)), total), np.full(padding, -1, np.int64)])
    positions = np.concatenate([*(np.arange(n) for n in total), np.arange(padding)])
    mine = layout.positions(len(samples), rank)
    return samples[None, mine], positions[None, mine]


def attention_mask(maps: Sequence[ContextMap], rank: int) -> np.ndarray:
    """bool ``[B, S, size * S]``: which keys a rank's queries see; keys are those of rank 0, 1, ... side by side.

    A token sees its own sample up to itself. Padding sees padding of its own kind, so that no row is empty.

    Args:
        maps: the maps of every rank of the group.
    """
    queries = maps[rank]
    samples = np.concatenate([m.samples for m in maps], axis=1)
    positions = np.concatenate([m.positions for m in maps], axis=1)
    same = queries.samples[:, :, None] == samples[:, None, :]
    return same & (positions[:, None, :] <= queries.positions[:, :, None])


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where each part begins in their concatenation."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _whole_numbers(name: str, values: Sequence[int]) -> np.ndarray:
    found = np.asarray(values)
    if found.size and not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"{name} are {found.dtype}: give whole numbers of tokens")
    return found.astype(np.int64)


def _check_lengths(total: np.ndarray, response: np.ndarray) -> None:
    if total.shape != response.shape:
        raise ValueError(f"{len(total)} total lengths and {len(response)} response lengths: give one of each per sample")
    broken = (response < 0) | (response >= total)
    if broken.any():
        sample = int(np.argmax(broken))
        raise ValueError(
            f"sample {sample} has {total[sample]} tokens and a response of {response[sample]}: the first response token is "
            "scored by the logits of the token before it, so at least one prompt token must be there"
        )
