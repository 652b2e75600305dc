"""A device-side alarm for broken tokens, read once per optimizer step."""

from collections.abc import Callable, Sequence

import torch


class FiniteGuard:
    """Remembers the first broken token of a step without a host sync per micro-batch.

    A loss hands it boolean fault masks; the trainer calls :meth:`raise_if_tripped` before the optimizer steps.
    The whole state is one int64 tensor of three numbers on the device: micro-batch, row, field.
    """

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None  # int64 [3], micro-batch -1 while nothing is broken
        self._fields: list[list[str]] = []  # per micro-batch
        self._describe: dict[int, Callable[[int], str]] = {}

    def watch(self, describe: Callable[[int], str]) -> None:
        """Names the rows of the next micro-batch: ``describe(row)`` says which sample and position a row is."""
        self._describe[len(self._fields)] = describe

    def add(self, faults: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Checks one micro-batch.

        Args:
            faults: pairs of a field's name and a bool mask ``[T]``, true where that field breaks an active token.
        """
        micro_batch = len(self._fields)
        self._fields.append([name for name, _ in faults])
        masks = torch.stack([mask for _, mask in faults]).to(torch.uint8)  # [fields, T]
        if masks.numel() == 0:
            return
        # argmax gives the first maximum; index_select keeps the row number on the device
        row = masks.amax(dim=0).argmax().view(1)
        worst, field = masks.index_select(1, row)[:, 0].max(dim=0, keepdim=True)
        found = torch.cat([torch.full_like(row, micro_batch), row, field])
        found = torch.where(worst > 0, found, -1)
        self._first = found if self._first is None else torch.where(self._first[0] >= 0, self._first, found)

    def raise_if_tripped(self) -> None:
        """Raises ValueError for the first broken token since the last call, then forgets the step. One host sync."""
        micro_batch, row, field = (-1, -1, -1) if self._first is None else self._first.tolist()
        fields, describe = self._fields, self._describe
        self.__init__()
        if micro_batch < 0:
            return
        where = f" ({describe[micro_batch](row)})" if micro_batch in describe else ""
        raise ValueError(
            f"{fields[micro_batch][field]} at row {row} of micro-batch {micro_batch}{where}: trained tokens need finite values. "
            "Nothing was updated. Look at what produced it: the rollout's log-probs, the reward, or a trainer that has diverged"
        )


def raise_on_fault(faults: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Checks one batch at once, for callers without a training loop. One host sync."""
    guard = FiniteGuard()
    guard.add(faults)
    guard.raise_if_tripped()
