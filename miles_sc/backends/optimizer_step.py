"""What one optimizer step is made of on every backend: the loss of its micro-batches, the alarms, the learning rate."""

import itertools
import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from miles_sc.backends.settings import OptimizerSettings
from miles_sc.data.micro_batch import MicroBatch
from miles_sc.loss.batch import LossOutput, LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.hub import LossFunction
from miles_sc.loss.metrics import StepMetrics


class StepLoss:
    """The losses of one optimizer step's micro-batches, with what they report on the way."""

    def __init__(self, function: LossFunction, settings: LossSettings, *, recompute: bool) -> None:
        """Args:
        recompute: run each loss again in backward, instead of keeping what it saved.
        """
        self._function, self._settings, self._recompute = function, settings, recompute
        self._guard = FiniteGuard()
        self.metrics = StepMetrics()

    def of(self, micro_batch: MicroBatch, logits: Tensor) -> Tensor:
        """A micro-batch's share of the step's loss, 0-d with graph; the shares of all ranks add up to the loss."""
        self._guard.watch(micro_batch.describe)
        output = self._run(micro_batch, logits)
        self.metrics.add(output.token_metrics, micro_batch.loss)
        return output.loss

    def _run(self, micro_batch: MicroBatch, logits: Tensor) -> LossOutput:
        if not self._recompute:
            return self._function(micro_batch.loss, logits, self._settings, self._guard)
        # the second run repeats what the first has reported
        guards = itertools.chain([self._guard], itertools.repeat(FiniteGuard()))
        return checkpoint(
            lambda again: self._function(micro_batch.loss, again, self._settings, next(guards)), logits, use_reentrant=False
        )

    def check(self, device: torch.device) -> None:
        """Refuses the step, on every rank, if a trained token anywhere has a value that is not finite."""
        error: ValueError | None = None
        try:
            self._guard.raise_if_tripped()
        except ValueError as found:
            error = found
        raise_on_every_rank(
            error, device, ValueError("another rank found a trained token with a value that is not finite; nothing was updated")
        )


def raise_on_every_rank(error: Exception | None, device: torch.device, elsewhere: Exception) -> None:
    """Raises what went wrong here, or ``elsewhere`` where it went wrong on another rank: none may wait for another in vain."""
    failed = torch.tensor(float(error is not None), device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if failed > 0:
        raise elsewhere


def exactly(micro_batches: Iterable[MicroBatch], count: int) -> Iterator[MicroBatch]:
    """The micro-batches of a step.

    Raises:
        ValueError: fewer or more than ``count``; ranks that ran different numbers would wait for each other.
    """
    found = 0
    for micro_batch in micro_batches:
        found += 1
        if found > count:
            break
        yield micro_batch
    if found != count:
        came = f"more than {count}" if found > count else found
        raise ValueError(f"{came} micro-batches came and {count} were announced: the step is not complete, nothing was updated")


def check_gradient_norm(norm: float) -> None:
    """Refuses a step on a gradient that is not finite."""
    if not math.isfinite(norm):
        raise ValueError(
            f"the gradient norm is {norm}: nothing was updated; lower --lr or look at the last metrics for what diverged"
        )


def clip_limit(settings: OptimizerSettings) -> float:
    """The largest gradient norm; ``clip_grad = 0`` is no limit."""
    return settings.clip_grad if settings.clip_grad > 0 else math.inf


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """Of the ``step``-th optimizer step, counted from 1: a linear warm-up, then constant."""
    return settings.lr * min(1.0, step / max(settings.lr_warmup_iters, 1))


def check_exported(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Refuses weights that no sampler may be given."""
    for name, value in weights.items():
        if not value.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity after the last update: the run has diverged; lower --lr")
    return weights
