"""What a kernel of candidate scoring does with one rank's logits; the algebra and the reductions around it are its caller's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from miles_sc.loss.vocabulary import VocabularyShard


@dataclass(frozen=True)
class RowStatistics:
    """Of each row's ``z = logits / temperature`` on this rank's true columns. A row with NaN or +inf is NaN.

    Attributes:
        largest: ``[T]``, -inf for a row without mass here (no columns, or every z is -inf).
        log_sum: ``[T]``, ``log(sum exp(z - largest))``; without meaning where there is no mass.
        selected: ``[T, 1+K]``, z at the columns asked for; 0 where they are another rank's.
        mean: ``[T]``, the expectation of ``z - largest`` under the softmax of these columns; None unless asked for.
        log_unit: ``[T]``, the kernel's backward forms ``exp(z - largest - log_unit)``, whatever is cheapest to it.
        saved: what its backward needs besides the logits, with T rows each.
    """

    largest: Tensor
    log_sum: Tensor
    selected: Tensor
    mean: Tensor | None
    log_unit: Tensor
    saved: tuple[Tensor, ...] = ()

    @classmethod
    def concatenate(cls, parts: "Sequence[RowStatistics]") -> "RowStatistics":
        """Those of several runs of rows, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.largest for part in parts]),
            torch.cat([part.log_sum for part in parts]),
            torch.cat([part.selected for part in parts]),
            None if parts[0].mean is None else torch.cat([part.mean for part in parts]),
            torch.cat([part.log_unit for part in parts]),
            tuple(torch.cat(tensors) for tensors in zip(*(part.saved for part in parts), strict=True)),
        )


@dataclass(frozen=True)
class RowGradient:
    """What comes from upstream: ``dz = e (scale + entropy_scale (z - entropy_shift)) + scatter(selected)``.

    ``e = exp(z - largest - log_unit)`` is the kernel's own, see :class:`RowStatistics`.

    Attributes:
        selected: ``[T, 1+K]``, 0 where the column is another rank's.
        scale: ``[T]``.
        entropy_scale, entropy_shift: ``[T]``, None where the entropy has no gradient.
    """

    selected: Tensor
    scale: Tensor
    entropy_scale: Tensor | None
    entropy_shift: Tensor | None

    def of_rows(self, rows: slice) -> "RowGradient":
        """That of some of the rows; views."""
        given = (self.selected, self.scale, self.entropy_scale, self.entropy_shift)
        return RowGradient(*(None if tensor is None else tensor[rows] for tensor in given))


class ScoringKernel(Protocol):
    """Holds a shard of the vocabulary and a temperature, no tensors."""

    shard: VocabularyShard
    temperature: float

    def statistics(self, logits: Tensor, columns: Tensor, owned: Tensor, *, with_entropy: bool) -> RowStatistics:
        """Args:
        logits: ``[T, V/TP]``.
        columns: int64 ``[T, 1+K]``, local columns.
        owned: bool ``[T, 1+K]``, whether the column is this rank's.
        """

    def write_gradient(
        self, out: Tensor, logits: Tensor, columns: Tensor, owned: Tensor, upstream: RowGradient, saved: tuple[Tensor, ...]
    ) -> None:
        """Fills ``out [T, V/TP]`` with the gradient, 0 in padding; it may be ``logits`` itself.

        Args:
            saved: of :class:`RowStatistics`.
        """
