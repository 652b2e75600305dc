"""Projection of the response rows alone to the vocabulary."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class ResponseRows:
    """Lets a model project only chosen rows, with its own head and whatever follows it (soft caps, scales)."""

    def __init__(self, head: torch.nn.Module, *, batch_first: bool = True) -> None:
        """Args:
        head: the output projection.
        batch_first: it is given ``[B, S, D]``; otherwise ``[S, B, D]``.
        """
        self._rows: Tensor | None = None
        self._batch_first = batch_first
        head.register_forward_pre_hook(self._choose)

    @contextmanager
    def select(self, rows: Tensor) -> Iterator[None]:
        """Inside the block the head sees the rows ``[T]`` of the flattened ``[B * S]`` only, as a batch of one."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _choose(self, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._rows is None:
            return None
        hidden = inputs[0] if self._batch_first else inputs[0].transpose(0, 1)
        chosen = hidden.flatten(0, 1)[self._rows]
        return (chosen[None] if self._batch_first else chosen[:, None], *inputs[1:])
