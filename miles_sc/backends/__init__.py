"""How a policy is built, run forward and backward, stepped, saved and exported."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from miles_sc.data.micro_batch import MicroBatch
from miles_sc.loss.batch import LossBatch, LossSettings
from miles_sc.loss.hub import LossFunction
from miles_sc.parallel.groups import ParallelGroups

ScoreFunction = Callable[[Tensor, LossBatch], Tensor]


class Backend(Protocol):
    """One rank of a policy. Every rank must call every method, since all of them hold collectives.

    Attributes:
        vocab_size: true vocabulary, all of which the sampler draws from.
    """

    device: torch.device
    groups: ParallelGroups
    vocab_size: int

    def score(self, micro_batch: MicroBatch, function: ScoreFunction) -> Tensor:
        """``function(logits, batch) -> [T]``, without graph: log-probs before a step, say.

        The logits are ``[T, V/TP]``: no other row than a response's is projected to the vocabulary.
        """

    def train_step(
        self, micro_batches: Iterable[MicroBatch], num_micro_batches: int, loss_function: LossFunction, settings: LossSettings
    ) -> dict[str, float]:
        """Forward and backward over the micro-batches of one optimizer step, then the step; its metrics.

        Args:
            micro_batches: built as they are needed.
            num_micro_batches: how many there are; the same on every rank.

        Raises:
            ValueError: a trained token or the gradient norm is not finite, or the number is another; no parameter has changed.
        """

    def export_weights(self) -> dict[str, Tensor]:
        """Whole float32 parameters on the CPU under Hugging Face names, on rank 0; empty elsewhere.

        Raises:
            ValueError: a weight that is not finite.
        """

    def save(self, directory: Path) -> None:
        """Writes parameters and optimizer state; OSError if it cannot be written."""

    def load(self, directory: Path) -> None:
        """Restores what :meth:`save` wrote, to the bit on the same layout; ValueError if it cannot be read."""
