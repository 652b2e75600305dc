"""This rank's columns of the vocabulary, and the reductions that make them one vocabulary again."""

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# Rows are scored a few at a time, so that the handful of passes over a chunk find it in the cache: on a CPU this, and the
# fused softmax kernel, decide the speed (a chunk beyond the cache costs 4x). An accelerator wants larger launches.
CPU_CHUNK_BYTES = 4 << 20
ACCELERATOR_CHUNK_BYTES = 256 << 20


@dataclass(frozen=True)
class VocabularyShard:
    """Global ids ``start .. start + width - 1``; the local columns from ``width`` on are padding.

    Attributes:
        vocab_size: true vocabulary over all ranks.
        group: tensor-parallel group, None where one rank holds every column.
    """

    start: int
    width: int
    vocab_size: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(columns: int, *, group: dist.ProcessGroup | None, vocab_size: int | None) -> "VocabularyShard":
        """The shard of this rank: the ranks' columns, one after the other, are the vocabulary and then padding.

        Equal widths with padding at the end (Megatron), ``torch.chunk``'s short last ranks, any other split. The first call
        of a group with a vocabulary asks every rank for its width, in one small collective.

        Args:
            columns: of the local logits; their true part is the same at every call with this vocabulary.
            group: tensor-parallel group.
            vocab_size: true vocabulary; None where nothing is padded.

        Raises:
            ValueError: a vocabulary that does not fit the columns or differs between ranks, on every rank alike; columns that
                have changed, on the rank whose they are.
        """
        if vocab_size is not None and (not isinstance(vocab_size, int) or isinstance(vocab_size, bool)):
            raise ValueError(f"vocab_size = {vocab_size!r}: give a whole number")
        alone = group is None or dist.get_world_size(group) == 1
        widths = (columns,) if alone else _columns_of_all_ranks(columns, group, vocab_size)
        rank = 0 if alone else dist.get_rank(group)
        whole, start = sum(widths), sum(widths[:rank])
        vocab_size = whole if vocab_size is None else vocab_size
        if not 0 < vocab_size <= whole:
            raise ValueError(f"vocab_size = {vocab_size}: must lie in 1..{whole}, the columns of all ranks together")
        width, expected = (min(max(vocab_size - start, 0), found) for found in (columns, widths[rank]))
        if width != expected:
            raise ValueError(
                f"{columns} columns on this rank, and {widths[rank]} at an earlier call with this vocabulary on the same group: "
                "split it as before, or make another group"
            )
        return VocabularyShard(start, width, vocab_size, None if alone else group)

    def combine(self, largest: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logit ``[T]`` of the whole vocabulary and ``log(sum exp(z - largest))`` over it. One MAX, one SUM.

        They are kept apart to the end: their sum would be rounded at the logits' own scale.

        Args:
            largest, log_sum: the same of this rank's columns; a row without mass here has ``largest = -inf``.
        """
        if self.group is None:
            return largest, log_sum
        top = self.max(largest.clone())
        here = torch.where(largest == -torch.inf, 0.0, (largest - top + log_sum).exp())
        return top, self.sum(here).log()

    def log_probs(self, selected: Tensor, top: Tensor, log_sum: Tensor, token_ids: Tensor) -> Tensor:
        """``log p [T, 1+K]`` of ids whose logits ``selected`` are 0 on all ranks but one; 0 where the id is -1. One SUM."""
        log_probs = torch.where(token_ids >= 0, (self.sum(selected) - top[:, None]) - log_sum[:, None], 0.0)
        return self.nan_outside(log_probs, token_ids)

    def nan_outside(self, log_probs: Tensor, token_ids: Tensor) -> Tensor:
        """NaN for an id that no rank owns: refused on the CPU before, made loud where looking would wait for the device."""
        return log_probs.masked_fill(token_ids >= self.vocab_size, torch.nan)

    def max(self, rows: Tensor) -> Tensor:
        """Elementwise maximum over the group, in place. One collective."""
        return self._reduce(rows, dist.ReduceOp.MAX)

    def sum(self, rows: Tensor) -> Tensor:
        """Elementwise sum over the group, in place. One collective."""
        return self._reduce(rows, dist.ReduceOp.SUM)

    def _reduce(self, rows: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group is not None:
            dist.all_reduce(rows, op=op, group=self.group)
        return rows

    def local(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each id here, and whether it is here at all; an absent id points at column 0."""
        owned = (token_ids >= self.start) & (token_ids < self.start + self.width)
        return torch.where(owned, token_ids - self.start, 0), owned


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# group -> vocabulary -> the ranks' columns
_splits: WeakKeyDictionary[dist.ProcessGroup, dict[int | None, tuple[int, ...]]] = WeakKeyDictionary()


def _columns_of_all_ranks(columns: int, group: dist.ProcessGroup, vocab_size: int | None) -> tuple[int, ...]:
    known = _splits.setdefault(group, {})
    if vocab_size not in known:
        found: list[tuple[int, int | None]] = [(0, None)] * dist.get_world_size(group)
        dist.all_gather_object(found, (columns, vocab_size), group=group)
        if len({vocabulary for _, vocabulary in found}) > 1:
            raise ValueError(f"vocab_size = {[v for _, v in found]} on the ranks of the group: give the same to all of them")
        known[vocab_size] = tuple(width for width, _ in found)
    return known[vocab_size]


def check_matrix(name: str, value: Tensor, wanted: str) -> None:
    """Refuses what is no local floating-point matrix.

    Raises:
        ValueError: with the value and what to give.
    """
    if hasattr(value, "to_local"):
        raise ValueError(f"{name} is a DTensor: give {name}.to_local(), and the group that it is sharded over as group=")
    if not isinstance(value, Tensor) or value.dim() != 2 or value.dtype not in _FLOATS:
        found = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} {found}: give floating-point {wanted}")


def logits_shard(logits: Tensor, group: dist.ProcessGroup | None, vocab_size: int | None) -> VocabularyShard:
    """The shard of ``logits [T, V/TP]``, see :meth:`VocabularyShard.of`."""
    check_matrix("logits", logits, "[T, V]")
    return VocabularyShard.of(logits.shape[1], group=group, vocab_size=vocab_size)


def check_scoring_inputs(token_ids: Tensor, rows: int, vocab_size: int, *, temperature: float, chunk_size: int = -1) -> None:
    """What every scoring function asks of its arguments.

    Raises:
        ValueError: shape, dtype, temperature, chunk size; ids out of range (on the CPU, where looking costs no sync).
    """
    if not isinstance(token_ids, Tensor):
        raise ValueError(f"token_ids is a {type(token_ids).__name__}: give an integer tensor [T, 1+K]")
    if token_ids.dim() != 2 or token_ids.shape[0] != rows:
        raise ValueError(f"token_ids {tuple(token_ids.shape)} for {rows} rows: give [T, 1+K] with the same T")
    if token_ids.dtype not in _INTEGERS:
        raise ValueError(f"token_ids has dtype {token_ids.dtype}: give int64 or int32")
    if not isinstance(temperature, int | float) or not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature = {temperature!r}: a trained distribution needs a finite number above 0")
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or (chunk_size != -1 and chunk_size < 1):
        raise ValueError(f"chunk_size = {chunk_size!r}: give a positive number of rows, or -1 to let the device decide")
    if token_ids.device.type == "cpu" and token_ids.numel():
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < -1 or highest >= vocab_size:
            raise ValueError(
                f"token_ids lie in {lowest}..{highest}: must lie in -1..{vocab_size - 1} (-1 is an unused slot); is the "
                "sampler's tokenizer the trainer's?"
            )


def accumulation_dtype(values: Tensor) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(values.dtype, torch.float32)


def chunk_rows(logits: Tensor) -> int:
    """Rows of ``[T, V]`` to work on at a time, as suits the device."""
    on_cpu = logits.device.type == "cpu"
    row_bytes = max(logits.shape[1], 1) * accumulation_dtype(logits).itemsize
    rows = (CPU_CHUNK_BYTES if on_cpu else ACCELERATOR_CHUNK_BYTES) // row_bytes
    threads = torch.get_num_threads() if on_cpu else 1
    return max(rows // threads * threads, threads)  # whole rows for every thread
