"""The ``score_centering`` loss: from a micro-batch and its logits to a number and its diagnostics."""

import torch
from torch import Tensor

from miles_sc.loss.batch import LossBatch, LossOutput, LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.score_centering.estimator import ScoreCenteringInputs, score_centering_loss
from miles_sc.loss.scoring import Scores, regularized, score


def score_centering(batch: LossBatch, logits: Tensor, settings: LossSettings, guard: FiniteGuard) -> LossOutput:
    """Score-centered policy gradient with optional TIS or MIS weights; entropy and reference KL stand beside it."""
    scores = score(logits, batch, settings, with_head=True)
    per_token, metrics = centered(scores, batch, settings, guard)
    loss, regularizer_metrics = regularized(per_token, scores, logits, batch, settings)
    return LossOutput(loss, metrics | regularizer_metrics)


def observe(batch: LossBatch, logits: Tensor, settings: LossSettings) -> dict[str, Tensor]:
    """The same diagnostics beside another loss, which does not notice: own scores, no graph, no guard."""
    with torch.no_grad():
        _, metrics = centered(score(logits, batch, settings, with_head=True), batch, settings, FiniteGuard())
    return metrics


def centered(scores: Scores, batch: LossBatch, settings: LossSettings, guard: FiniteGuard) -> tuple[Tensor, dict[str, Tensor]]:
    """The estimator on a scored micro-batch: per-token loss ``[T]`` and metrics ``[T]``."""
    inputs = ScoreCenteringInputs(
        train_log_probs=scores.sampled,
        train_head_log_probs=scores.head,
        rollout_log_probs=batch.rollout_log_probs,
        rollout_head_log_probs=batch.candidate_log_probs,
        head_mask=batch.candidate_ids >= 0,
        advantages=batch.advantages,
        active=batch.active,
        complete_head=settings.score_centering.mode == "support",
    )
    per_token, metrics = score_centering_loss(inputs, guard=guard, **settings.score_centering.estimator_settings)
    # the alignment alarm: rows shifted by one leave every other metric plausible, and this one falls at once
    in_head = (batch.candidate_ids == batch.token_ids[:, None]).any(dim=1)
    return per_token, metrics | {"sc_sampled_in_head": in_head.to(per_token.dtype)}
