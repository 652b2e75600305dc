"""What a kernel of candidate scoring does with one rank's logits; the algebra and the reductions around it are its caller's."""

from dataclasses import dataclass
from typing import Protocol

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
        saved: what its backward needs besides the logits.
    """

    largest: Tensor
    log_sum: Tensor
    selected: Tensor
    mean: Tensor | None
    log_unit: Tensor
    saved: tuple[Tensor, ...] = ()


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
        self,
        gradient: Tensor,
        logits: Tensor,
        columns: Tensor,
        owned: Tensor,
        grad_selected: Tensor,
        saved: tuple[Tensor, ...],
        *,
        scale: Tensor,
        entropy_scale: Tensor | None,
        entropy_shift: Tensor | None,
    ) -> None:
        """Fills ``gradient`` with ``e (scale + entropy_scale (z - entropy_shift)) + scatter(grad_selected)``, 0 in padding.

        Args:
            gradient: ``[T, V/TP]``; may be ``logits`` itself.
            grad_selected: ``[T, 1+K]``, 0 where not owned.
            saved: of :class:`RowStatistics`; ``e`` is the ``exp`` that its ``log_unit`` belongs to.
            scale, entropy_scale, entropy_shift: ``[T]``.
        """
