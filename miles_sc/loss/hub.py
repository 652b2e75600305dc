"""Losses by name: what a loss is given, what it gives back, and the registry that hosts look it up in."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from miles_sc.arguments import ScoreCenteringConfig
from miles_sc.loss.finite_guard import FiniteGuard


@dataclass(frozen=True)
class LossBatch:
    """The response rows of one micro-batch, T in all, in the order in which the model scored them.

    Attributes:
        token_ids: int64 ``[T]``, the sampled tokens.
        weights: ``[T]``, the share of each row in the loss; they sum to 1 over all active rows of the optimizer step.
        active: bool ``[T]``, the loss mask.
        advantages: ``[T]``.
        rollout_log_probs: ``[T]``, log q of the sampled token.
        candidate_ids, candidate_log_probs: ``[T, K]``, -1 and -inf in unused slots; None while recording is off.
        old_log_probs, ref_log_probs: ``[T]``, of the policy before the step and of the reference.
    """

    token_ids: Tensor
    weights: Tensor
    active: Tensor
    advantages: Tensor
    rollout_log_probs: Tensor
    candidate_ids: Tensor | None = None
    candidate_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None


@dataclass(frozen=True)
class LossSettings:
    """What does not change during a run. Names as the flags have them."""

    score_centering: ScoreCenteringConfig = field(default_factory=ScoreCenteringConfig)
    observe: bool = False
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    use_tis: bool = False
    tis_mode: str = "truncate"
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    entropy_coef: float = 0.0
    observe_entropy: bool = False
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    use_unbiased_kl: bool = False
    log_probs_chunk_size: int = -1
    vocab_size: int | None = None
    tensor_parallel_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the step's loss, and what there is to say about each row.

    Attributes:
        loss: 0-d, with graph.
        token_metrics: detached ``[T]`` tensors, to be averaged over active rows with the batch's weights.
    """

    loss: Tensor
    token_metrics: dict[str, Tensor]


LossFunction = Callable[[LossBatch, Tensor, LossSettings, FiniteGuard], LossOutput]
_LOSSES: dict[str, LossFunction] = {}


def register_loss(name: str) -> Callable[[LossFunction], LossFunction]:
    """Decorator: :func:`loss_function` then finds a loss by this name."""

    def register(function: LossFunction) -> LossFunction:
        if name in _LOSSES:
            raise ValueError(f"loss {name!r} is registered already, by {_LOSSES[name].__module__}: choose another name")
        _LOSSES[name] = function
        return function

    return register


def loss_function(name: str) -> LossFunction:
    """``loss(batch, logits [T, V/TP], settings, guard) -> LossOutput`` of a name; ValueError lists the names there are."""
    # the built-in losses register themselves when they are imported
    import miles_sc.loss.policy
    import miles_sc.loss.score_centering.loss  # noqa: F401

    if name not in _LOSSES:
        raise ValueError(f"--loss-type {name}: choose one of {', '.join(sorted(_LOSSES))}")
    return _LOSSES[name]
