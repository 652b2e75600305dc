"""Slime's trainer: the loss inside its own dispatch, on Megatron's groups; what is reduced and what is logged."""

import argparse
import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from miles_sc.hosts import loss
from miles_sc.hosts.activation import required
from miles_sc.hosts.batch import HostGroups
from miles_sc.hosts.run import bound, is_centered, is_observed
from miles_sc.hosts.train_data import KEYS


def megatron_groups() -> HostGroups:
    """Slime keeps no parallel state of its own."""
    from megatron.core import mpu

    context_size = mpu.get_context_parallel_world_size()
    return HostGroups(
        tensor=mpu.get_tensor_model_parallel_group() if mpu.get_tensor_model_parallel_world_size() > 1 else None,
        context=mpu.get_context_parallel_group() if context_size > 1 else None,
        context_rank=mpu.get_context_parallel_rank(),
        context_size=context_size,
    )


def loss_function(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``loss_function(args, batch, num_microbatches, step_global_batch_size, logits)``.

    It chooses by name among its own and calls what ``--custom-loss-function-path`` names; ours goes in by that door.
    """
    call = bound(wrapped, args, kwargs)
    run = call["args"]
    if is_centered(run):
        required("slime")
        return wrapped(**{**call, "args": as_custom_loss(run)})
    if is_observed(run):
        required("slime")
        loss.watch_drift(run, call["batch"], call["logits"], groups=megatron_groups())
    return wrapped(*args, **kwargs)


def as_custom_loss(run: argparse.Namespace) -> argparse.Namespace:
    """A run whose custom loss is :func:`centered_loss`."""
    custom = copy.copy(run)
    custom.loss_type, custom.custom_loss_function_path = "custom_loss", f"{__name__}.{centered_loss.__name__}"
    return custom


def centered_loss(
    run: argparse.Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The ``score_centering`` loss as one of Slime's custom losses."""
    return loss.centered_loss(run, batch, logits, sum_of_sample_mean, groups=megatron_groups())


def step_metrics(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Around ``reduce_train_step_metrics``, which every rank with a loss calls once a step: adds what a sum cannot say.

    A number that Slime itself reports keeps its name and value.
    """
    reduced = wrapped(*args, **kwargs)
    return {**loss.STEP.take_metrics(bound(wrapped, args, kwargs)["dp_with_cp_group"]), **reduced}


def logged_data(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Around ``log_rollout_data(rollout_id, args, rollout_data)``, which averages every key that it does not know."""
    call = bound(wrapped, args, kwargs)
    call["rollout_data"] = {key: value for key, value in call["rollout_data"].items() if key not in KEYS}
    return wrapped(**call)
