"""The trainer's log-probs of a micro-batch: sampled token and candidates, under the distribution that was sampled from."""

from dataclasses import dataclass

from torch import Tensor

from miles_sc.loss.batch import LossBatch, LossSettings
from miles_sc.loss.reduction import weighted_sum
from miles_sc.loss.regularizers import reference_kl
from miles_sc.loss.selected_log_probs import selected_log_probs
from miles_sc.loss.support_log_probs import support_log_probs


@dataclass(frozen=True)
class Scores:
    """Attributes:
    sampled: ``[T]`` log p of the sampled token.
    head: ``[T, K]`` log p of the candidates; K = 0 where none were asked for.
    entropy: ``[T]``, or None where neither its coefficient nor an observer asks for it; detached if only observed.
    """

    sampled: Tensor
    head: Tensor
    entropy: Tensor | None


def score(logits: Tensor, batch: LossBatch, settings: LossSettings, *, with_head: bool) -> Scores:
    """Scores a micro-batch.

    Unfiltered sampling is scored over the full vocabulary; filtered sampling over each row's recorded support.

    Args:
        logits: ``[T, V/TP]``, or ``[S, V/TP]`` with ``batch.logit_rows``.
        with_head: score the candidates too. A replayed support is always read, since it is the normaliser.
    """
    replay = settings.score_centering.mode == "support"
    columns = slice(None) if with_head or replay else slice(1)
    trained = settings.entropy_coef != 0
    log_probs, entropy = _log_probs(logits, batch, columns, settings, replay, with_entropy=trained or settings.observe_entropy)
    if entropy is not None and not trained:
        entropy = entropy.detach()
    return Scores(log_probs[:, 0], log_probs[:, 1:], entropy)


def full_vocabulary_log_probs(logits: Tensor, batch: LossBatch, settings: LossSettings) -> Tensor:
    """``[T]`` log p of the sampled tokens over the full vocabulary, whatever the sampling: what a reference is compared with."""
    return _log_probs(logits, batch, slice(1), settings, replay=False, with_entropy=False)[0][:, 0]


def _log_probs(
    logits, batch: LossBatch, columns: slice, settings: LossSettings, replay: bool, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    ids = batch.selected_ids[:, columns]
    common = dict(
        rows=batch.logit_rows,
        group=settings.tensor_parallel_group,
        vocab_size=settings.vocab_size,
        temperature=settings.score_centering.temperature,
        with_entropy=with_entropy,
    )
    if replay:
        result = support_log_probs(logits, ids, **common)
    else:
        result = selected_log_probs(
            logits, ids, chunk_size=settings.log_probs_chunk_size, inplace_backward=settings.inplace_backward, **common
        )
    return result if with_entropy else (result, None)


def regularized(
    policy_gradient: Tensor, scores: Scores, logits: Tensor, batch: LossBatch, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Adds entropy and reference KL to a per-token policy-gradient loss.

    Returns:
        The micro-batch's share of the loss (0-d, with graph) and the per-token metrics ``loss``, ``pg_loss`` and, where they
        take part, ``entropy_loss``, ``kl_loss``, ``kl_invalid_fraction``.
    """
    per_token, metrics = policy_gradient, {"pg_loss": policy_gradient}
    if scores.entropy is not None:
        metrics["entropy_loss"] = scores.entropy
        if settings.entropy_coef != 0:
            per_token = per_token - settings.entropy_coef * scores.entropy
    if settings.use_kl_loss:
        # a replayed support normalises p differently from the reference; KL always compares full-vocabulary scores
        replay = settings.score_centering.mode == "support"
        log_probs = full_vocabulary_log_probs(logits, batch, settings) if replay else scores.sampled
        log_ratio = scores.sampled - batch.rollout_log_probs if settings.use_unbiased_kl else None
        kl, invalid = reference_kl(
            log_probs, batch.ref_log_probs, kind=settings.kl_loss_type, active=batch.active, train_rollout_log_ratio=log_ratio
        )
        metrics.update(kl_loss=kl, kl_invalid_fraction=invalid)
        if settings.kl_loss_coef != 0:
            per_token = per_token + settings.kl_loss_coef * kl
    metrics["loss"] = per_token
    return weighted_sum(per_token, batch), {name: value.detach() for name, value in metrics.items()}
