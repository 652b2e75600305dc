"""What one optimizer step is made of on every backend: the loss of a micro-batch, the alarm, the learning rate."""

import itertools
import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from miles_sc.backends.settings import OptimizerSettings
from miles_sc.loss.batch import LossBatch, LossOutput, LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.hub import LossFunction


def micro_batch_loss(
    logits: Tensor, batch: LossBatch, loss_function: LossFunction, settings: LossSettings, guard: FiniteGuard, *, recompute: bool
) -> LossOutput:
    """The loss of a micro-batch; with ``recompute`` it runs again in backward, instead of keeping what it saved."""
    if not recompute:
        return loss_function(batch, logits, settings, guard)
    # the second run repeats what the first has reported
    guards = itertools.chain([guard], itertools.repeat(FiniteGuard()))
    return checkpoint(lambda scores: loss_function(batch, scores, settings, next(guards)), logits, use_reentrant=False)


def raise_on_every_rank(guard: FiniteGuard, device: torch.device) -> None:
    """A broken token on one rank stops all of them before the optimizer steps: none may wait for another in vain."""
    error: ValueError | None = None
    try:
        guard.raise_if_tripped()
    except ValueError as found:
        error = found
    tripped = torch.tensor(float(error is not None), device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(tripped, op=dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if tripped > 0:
        raise ValueError("another rank found a trained token with a value that is not finite; nothing was updated")


def check_gradient_norm(norm: float) -> None:
    """Refuses a step on a gradient that is not finite."""
    if not math.isfinite(norm):
        raise ValueError(
            f"the gradient norm is {norm}: nothing was updated; lower --lr or look at the last metrics for what diverged"
        )


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """Of the ``step``-th optimizer step, counted from 1: a linear warm-up, then constant."""
    return settings.lr * min(1.0, step / max(settings.lr_warmup_iters, 1))
