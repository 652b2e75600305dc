"""The loss inside a host: fed by the host's logits and groups, and watched until the optimizer's step."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from miles_sc.config import LOSS_TYPE, ScoreCenteringConfig
from miles_sc.hosts.batch import HostGroups, HostRows, describe_row, loss_batch
from miles_sc.hosts.train_data import check_received
from miles_sc.loss.batch import LossBatch, LossOutput, LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.hub import loss_function
from miles_sc.loss.metrics import StepMetrics
from miles_sc.loss.reduction import weighted_sum
from miles_sc.loss.score_centering.loss import observe

# What a host averages itself, as it does its other losses' numbers; the rest is averaged with its worst cases beside it.
_HOSTS_METRICS = ("loss", "pg_loss", "entropy_loss", "kl_loss")
_SEEN = "miles_sc_seen"  # in a batch: recomputation of the loss passes it twice


class Step:
    """What the micro-batches of one optimizer step have said so far, in this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Before a step's first micro-batch: one that was given up has left its own behind."""
        self.guard = FiniteGuard()
        self.metrics: StepMetrics | None = None

    def add(self, values: Mapping[str, Tensor], batch: LossBatch) -> None:
        self.metrics = self.metrics or StepMetrics()
        self.metrics.add(values, batch)

    def take_metrics(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Over all ranks of the group, then forgotten; nothing where no micro-batch was seen."""
        metrics, self.metrics = self.metrics, None
        return {} if metrics is None else metrics.reduce(group, normalize=True)


STEP = Step()


def centered_loss(
    run: argparse.Namespace,
    batch: dict[str, Any],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
    *,
    groups: HostGroups,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The ``score_centering`` loss in a host's calling convention.

    Args:
        run: the host's namespace.
        batch: the host's micro-batch with the recorded candidates.
        logits: ``[1, S, V/TP]`` or ``[B, S, V/TP]`` of this context-parallel rank; float32 or bfloat16.
        sum_of_sample_mean: the host's reduction. It holds for one order of rows; ours has the same weights in all.
        groups: where this process is in the host's layout.

    Returns:
        The micro-batch's summed loss, which the host scales, and the numbers that the host averages.
    """
    rows, settings, given = _prepared(run, batch, logits, groups)
    first = not batch.get(_SEEN)
    batch[_SEEN] = True
    # a second pass repeats what the first has reported
    guard = STEP.guard if first else FiniteGuard()
    if first:
        names = batch.get("sample_indices")
        guard.watch(lambda row: describe_row(rows.slots, names, row))
    output = loss_function(LOSS_TYPE)(given, logits.flatten(0, 1), settings, guard)
    if first:
        STEP.add({name: values for name, values in output.token_metrics.items() if name not in _HOSTS_METRICS}, given)
    return output.loss, _for_the_host(output, given)


def watch_drift(run: argparse.Namespace, batch: dict[str, Any], logits: Tensor, *, groups: HostGroups) -> None:
    """The diagnostics of one micro-batch; its logits get no gradient from it."""
    if not batch.get(_SEEN):
        batch[_SEEN] = True
        rows, settings, given = _prepared(run, batch, logits.detach(), groups)
        STEP.add(observe(given, logits.detach().flatten(0, 1), settings), given)


def _prepared(
    run: argparse.Namespace, batch: Mapping[str, Any], logits: Tensor, groups: HostGroups
) -> tuple[HostRows, LossSettings, LossBatch]:
    check_received(batch)
    rows = HostRows(run, batch, logits, groups)
    return rows, loss_settings(run, groups), loss_batch(run, batch, rows, logits.device)


def _for_the_host(output: LossOutput, batch: LossBatch) -> dict[str, Tensor]:
    return {
        name: weighted_sum(output.token_metrics[name], batch).detach() for name in _HOSTS_METRICS if name in output.token_metrics
    }


def loss_settings(run: argparse.Namespace, groups: HostGroups) -> LossSettings:
    """A host's flags as the loss knows them."""
    return LossSettings(
        score_centering=ScoreCenteringConfig.from_args(run),
        entropy_coef=run.entropy_coef,
        observe_entropy=bool(getattr(run, "observe_training_entropy", False)),
        use_kl_loss=run.use_kl_loss,
        kl_loss_coef=run.kl_loss_coef,
        kl_loss_type=run.kl_loss_type,
        use_unbiased_kl=run.use_unbiased_kl,
        log_probs_chunk_size=run.log_probs_chunk_size,
        vocab_size=getattr(run, "vocab_size", None),
        tensor_parallel_group=groups.tensor,
    )


# --- between the last backward and the optimizer's step


def forward_backward(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``get_forward_backward_func()`` where Megatron's train step sees it: a broken token stops the step before it."""
    run = wrapped(*args, **kwargs)

    def checked(*inner_args: Any, **inner_kwargs: Any) -> Any:
        STEP.forget()
        result = run(*inner_args, **inner_kwargs)
        STEP.guard.raise_if_tripped()
        return result

    return checked
