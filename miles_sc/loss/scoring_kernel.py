"""What a kernel of candidate scoring does with one rank's logits; the algebra and the reductions around it are its caller's."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from miles_sc.loss.logit_rows import LogitRows
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
        saved: what its backward needs besides the logits.
    """

    largest: Tensor
    log_sum: Tensor
    selected: Tensor
    mean: Tensor | None
    log_unit: Tensor
    saved: tuple[Tensor | None, ...] = ()


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


class ScoringKernel(Protocol):
    """Holds a shard of the vocabulary and a temperature, no tensors."""

    shard: VocabularyShard
    temperature: float

    def statistics(self, logits: Tensor, rows: LogitRows, columns: Tensor, owned: Tensor, *, with_entropy: bool) -> RowStatistics:
        """Args:
        logits: ``[S, V/TP]``.
        rows: the T of them that are scored.
        columns: int64 ``[T, 1+K]``, local columns.
        owned: bool ``[T, 1+K]``, whether the column is this rank's.
        """

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
        """Fills these rows of ``out [S, V/TP]`` with the gradient, 0 in padding; it may be ``logits`` itself.

        What the other rows hold afterwards is the caller's to overwrite.

        Args:
            saved: of :class:`RowStatistics`.
        """
