"""The PPO/GRPO policy loss that users come from, with truncated or masked importance weights."""

import torch
from torch import Tensor

from miles_sc.loss.batch import LossBatch, LossOutput, LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.score_centering.estimator import k3_rollout_to_train
from miles_sc.loss.score_centering.loss import observe
from miles_sc.loss.scoring import regularized, score

TIS_MODES = ("truncate", "mask")


def policy_loss(batch: LossBatch, logits: Tensor, settings: LossSettings, guard: FiniteGuard) -> LossOutput:
    """Clipped policy gradient: ``-min(r A, clip(r, 1 - eps, 1 + eps_high) A)``, ``r = p / p_old``, times the weight.

    With ``use_tis`` the weight is ``p_old / q``, truncated into ``[tis_clip_low, tis_clip]`` or masked outside it.
    """
    scores = score(logits, batch, settings, with_head=False)
    trained = batch.active & (batch.advantages != 0)
    guard.add(_faults(scores.sampled, batch, trained, settings))

    log_ratio = torch.where(trained, scores.sampled - batch.old_log_probs, 0.0)
    ratio = log_ratio.exp()
    advantages = torch.where(trained, batch.advantages, 0.0)
    clipped_ratio = ratio.clamp(1 - settings.eps_clip, 1 + settings.eps_clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    metrics = {"pg_clipfrac": (clipped_ratio * advantages < ratio * advantages).to(ratio.dtype), "ppo_kl": -log_ratio.detach()}
    if settings.use_tis:
        weight, untruncated = _mismatch_weight(batch, settings)
        # a token without advantage adds nothing, whatever its weight is
        per_token = torch.where(trained, per_token * weight, 0.0)
        metrics.update(tis=untruncated, tis_clipfrac=(weight != untruncated).to(ratio.dtype))
    metrics.update(_drift(scores.sampled.detach(), batch))
    loss, regularizer_metrics = regularized(per_token, scores, logits, batch, settings)
    metrics.update(regularizer_metrics)
    if settings.observe:
        metrics.update(observe(batch, logits, settings))
    return LossOutput(loss, metrics)


def _mismatch_weight(batch: LossBatch, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """The weight and the ratio it comes from, ``[T]`` each, without graph."""
    ratio = torch.where(batch.active, batch.old_log_probs - batch.rollout_log_probs, 0.0).exp()
    low, high = settings.tis_clip_low, settings.tis_clip
    if settings.tis_mode == "truncate":
        return ratio.clamp(low, high), ratio
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0), ratio


def _drift(log_probs: Tensor, batch: LossBatch) -> dict[str, Tensor]:
    difference = torch.where(batch.active, log_probs - batch.rollout_log_probs, 0.0)
    return {"train_rollout_logprob_abs_diff": difference.abs(), "train_rollout_kl": k3_rollout_to_train(difference)}


def _faults(log_probs: Tensor, batch: LossBatch, trained: Tensor, settings: LossSettings) -> list[tuple[str, Tensor]]:
    values = {"train_log_probs": log_probs, "old_log_probs": batch.old_log_probs, "advantages": batch.advantages}
    if settings.use_tis:
        values["rollout_log_probs"] = batch.rollout_log_probs
    return [(f"NaN or infinity in {name}", trained & ~value.isfinite()) for name, value in values.items()]
