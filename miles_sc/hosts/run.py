"""What a host's namespace says about score centering, and a host function's arguments by name."""

import argparse
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from miles_sc.config import LOSS_TYPE, ScoreCenteringConfig
from miles_sc.rollout.model_directory import model_vocabulary

PROVIDER = "score_centering_provider"


def recording(run: argparse.Namespace) -> ScoreCenteringConfig | None:
    """What a run records; None where the feature is off."""
    return ScoreCenteringConfig.from_args(run) if getattr(run, "rollout_top_logprobs_num", 0) else None


def is_centered(run: argparse.Namespace) -> bool:
    """Whether the run trains with the score-centering loss."""
    return getattr(run, "loss_type", None) == LOSS_TYPE


def is_observed(run: argparse.Namespace) -> bool:
    """Whether the run watches the drift beside another loss."""
    # a critic, whose actor sets this, has no distribution
    return bool(getattr(run, "score_centering_observe", False)) and getattr(run, "loss_type", None) != "value_loss"


def is_asked_for(run: argparse.Namespace) -> bool:
    """Whether a run wants anything of us."""
    return is_centered(run) or is_observed(run) or bool(getattr(run, "rollout_top_logprobs_num", 0))


def producer_vocabulary(run: argparse.Namespace) -> int | None:
    """The sampler's vocabulary, from ``--hf-checkpoint``; None where that is no directory of this machine."""
    checkpoint = getattr(run, "hf_checkpoint", None)
    return None if checkpoint is None else _vocabulary(str(checkpoint))


@cache
def _vocabulary(checkpoint: str) -> int | None:
    return model_vocabulary(Path(checkpoint))


def bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, defaults included."""
    if inspect.ismethod(function):  # cached by the function, of which there is one
        args, function = (function.__self__, *args), function.__func__
    call = _signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


_signature = cache(inspect.signature)
