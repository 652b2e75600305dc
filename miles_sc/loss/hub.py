"""Losses by name: what a trainer or a host looks a ``--loss-type`` up in."""

from collections.abc import Callable

from torch import Tensor

from miles_sc.config import LOSS_TYPE
from miles_sc.loss.batch import LossBatch, LossOutput, LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.policy import policy_loss
from miles_sc.loss.score_centering.loss import score_centering

LossFunction = Callable[[LossBatch, Tensor, LossSettings, FiniteGuard], LossOutput]
_LOSSES: dict[str, LossFunction] = {"policy_loss": policy_loss, LOSS_TYPE: score_centering}


def register_loss(name: str, function: LossFunction) -> None:
    """Adds a loss of your own: :func:`loss_function` then finds it by this name."""
    if name in _LOSSES:
        raise ValueError(f"loss {name!r} is registered already, by {_LOSSES[name].__module__}: choose another name")
    _LOSSES[name] = function


def loss_function(name: str) -> LossFunction:
    """``loss(batch, logits [T, V/TP], settings, guard) -> LossOutput`` of a name; ValueError lists the names there are."""
    if name not in _LOSSES:
        raise ValueError(f"--loss-type {name}: choose one of {', '.join(sorted(_LOSSES))}")
    return _LOSSES[name]
