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
    """One rank of a policy. Every rank must call every method, since all of them hold collectives."""

    device: torch.device
    groups: ParallelGroups
    vocab_size: int

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """``[T, V/TP]`` at the response rows; no other row is projected to the vocabulary."""

    def score(self, micro_batches: Iterable[MicroBatch], function: ScoreFunction) -> list[Tensor]:
        """``function(logits, batch) -> [T]`` of each micro-batch, without graph: log-probs before a step, say."""

    def train_step(
        self, micro_batches: Iterable[MicroBatch], passes: int, loss_function: LossFunction, settings: LossSettings
    ) -> dict[str, float]:
        """Forward and backward over the micro-batches of one optimizer step, then the step; its metrics.

        Args:
            micro_batches: built as they are needed.
            passes: how many there are; the same on every rank.

        Raises:
            ValueError: a trained token or the gradient norm is not finite; no parameter has changed then.
        """

    def export_weights(self) -> dict[str, Tensor]:
        """Whole float32 parameters on the CPU under Hugging Face names, on rank 0; empty elsewhere."""

    def save(self, directory: Path) -> None:
        """Writes parameters and optimizer state; OSError if it cannot be written."""

    def load(self, directory: Path) -> None:
        """Restores what :meth:`save` wrote, to the bit on the same layout; ValueError if it cannot be read."""
