"""Miles's trainer: the loss inside its own dispatch, on its parallel state; what it reduces and logs."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from miles_sc.hosts.activation import activation
from miles_sc.hosts.batch import HostGroups
from miles_sc.hosts.loss import STEP, centered_loss, watch_drift
from miles_sc.hosts.run import PROVIDER, bound, is_centered, is_observed

HostLoss = Callable[[argparse.Namespace, dict[str, Any], Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, dict[str, Tensor]]]


def miles_groups() -> HostGroups:
    """Miles's parallel state."""
    from miles.backends.training_utils.parallel import get_parallel_state

    state = get_parallel_state()
    return HostGroups(
        tensor=state.tp.group if state.tp.size > 1 else None,
        context=state.cp.group if state.cp.size > 1 else None,
        context_rank=state.cp.rank,
        context_size=state.cp.size,
    )


def dispatch(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HostLoss:
    """Around ``get_loss_function(args)``; a later Miles gives it the name of another loss for single requests."""
    call = bound(wrapped, args, kwargs)
    run = call.pop("args")
    active = activation(wrapped.__module__.split(".")[0])
    if active is None:  # undone, and the caller has bound us
        return wrapped(*args, **kwargs)
    provider = getattr(run, PROVIDER, "host" if active.own_loss else "miles_sc")
    if is_centered(run) and provider == "miles_sc" and not any(call.values()):
        active.require()
        ours = partial(centered_loss, groups=miles_groups())
        return _checked_at_once(ours) if active.own_loss else ours
    function = wrapped(*args, **kwargs)
    if not is_observed(run):
        return function
    active.require()
    return _observed(function)


def _checked_at_once(function: HostLoss) -> HostLoss:
    """Where the plugin takes the loss alone over, it does not know when the optimizer steps: one host sync per micro-batch."""

    def checked(run: argparse.Namespace, batch: dict[str, Any], logits: Tensor, reduce: Callable[[Tensor], Tensor]) -> Any:
        result = function(run, batch, logits, reduce)
        STEP.guard.raise_if_tripped()
        return result

    return checked


def _observed(function: HostLoss) -> HostLoss:
    """Another loss with the diagnostics beside it; its value and gradient stay as they are."""

    def observed(run: argparse.Namespace, batch: dict[str, Any], logits: Tensor, reduce: Callable[[Tensor], Tensor]) -> Any:
        watch_drift(run, batch, logits, groups=miles_groups())
        return function(run, batch, logits, reduce)

    return observed


def train_core(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around the FSDP actor's ``_train_core``: a broken token stops each step before it is made, by a hook of the optimizer."""
    STEP.forget()
    handle = instance.optimizer.register_step_pre_hook(lambda *_: STEP.guard.raise_if_tripped())
    try:
        return wrapped(*args, **kwargs)
    finally:
        handle.remove()


def step_metrics(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Around ``aggregate_train_losses``, which every rank with a loss calls once a step: adds what a sum cannot say.

    Under independent data parallelism these numbers are of one replica: its groups are none that torch reduces over.
    """
    from miles.backends.training_utils.parallel import get_parallel_state

    reduced = wrapped(*args, **kwargs)
    # beside another loss, a number of the same name stays the host's
    return {**STEP.take_metrics(get_parallel_state().intra_dp_cp.group), **reduced}
