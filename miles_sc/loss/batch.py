"""What a loss is given and what it gives back."""

from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from torch import Tensor

from miles_sc.config import ScoreCenteringConfig


@dataclass(frozen=True)
class LossBatch:
    """The response rows of one micro-batch, T in all, in the order in which the model scored them.

    Attributes:
        selected_ids: int64 ``[T, 1+K]``, the sampled token and its candidates, -1 in unused slots; K = 0 while recording is off.
        weights: ``[T]``, the share of each row in the loss; they sum to 1 over all active rows of the optimizer step; a host
            scales the sum itself.
        active: bool ``[T]``, the loss mask.
        advantages: ``[T]``.
        rollout_log_probs: ``[T]``, log q of the sampled token.
        candidate_log_probs: ``[T, K]``, log q of the candidates, -inf in unused slots; None while recording is off.
        old_log_probs, ref_log_probs: ``[T]``, of the policy before the step and of the reference.
        logit_rows: int64 ``[T]``, ascending: where these rows lie in the logits; None where the logits are theirs alone.
    """

    selected_ids: Tensor
    weights: Tensor
    active: Tensor
    advantages: Tensor
    rollout_log_probs: Tensor
    candidate_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    logit_rows: np.ndarray | None = None

    @property
    def token_ids(self) -> Tensor:
        """``[T]``, the sampled tokens; a view."""
        return self.selected_ids[:, 0]

    @property
    def candidate_ids(self) -> Tensor:
        """``[T, K]``, the candidates; a view."""
        return self.selected_ids[:, 1:]


@dataclass(frozen=True)
class LossSettings:
    """What does not change during a run. Names as the flags have them.

    ``inplace_backward``: the gradient takes the logits' memory; nothing may read them after backward.
    """

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
    inplace_backward: bool = False
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
