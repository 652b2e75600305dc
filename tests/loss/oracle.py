"""Dense float64 references for the loss: the whole vocabulary, plain autograd and none of the closed forms.

The estimator sees K candidates and a tail summary. Here the distribution it stands for is written out over every
token (``q_hat = q`` on the head, ``rho p`` outside), the weight function is applied to ``p / q_hat`` as it is defined,
and autograd differentiates the sum. Agreement of the two is the claim under test.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from miles_sc import ScoreCenteringInputs

EPS = 1e-6

Weight = Callable[[torch.Tensor], torch.Tensor]


def weight_function(mode: str, *, tis_clip: float = 2.0, mis_low: float = 0.5, mis_high: float = 5.0) -> Weight:
    """The weight ``f`` of a probability ratio, as it is defined."""
    return {
        "none": torch.ones_like,
        "tis": lambda ratio: torch.where(ratio < tis_clip, ratio, tis_clip),
        "mis": lambda ratio: torch.where((mis_low <= ratio) & (ratio <= mis_high), ratio, 0.0),
    }[mode]


@dataclass(frozen=True)
class DenseBatch:
    """T tokens with both distributions over the whole vocabulary.

    train_logits [T, V]; rollout_log_probs [T, V], not necessarily normalised; token_ids [T, 1+K] with the sampled token
    first and -1 in unused slots; advantages [T]; active bool [T] or None. With ``complete`` the head is all there is.
    """

    train_logits: torch.Tensor
    rollout_log_probs: torch.Tensor
    token_ids: torch.Tensor
    advantages: torch.Tensor
    active: torch.Tensor | None = None
    complete: bool = False

    def with_(self, **changes) -> "DenseBatch":
        return replace(self, **changes)

    @property
    def head_mask(self) -> torch.Tensor:
        return self.token_ids[:, 1:] >= 0


@dataclass
class DenseResult:
    """Per token [T]; gradient [T, V] is that of ``loss.sum()`` with respect to the train logits."""

    gradient: list = field(default_factory=list)
    loss: list = field(default_factory=list)
    correction: list = field(default_factory=list)
    coefficient_l1: list = field(default_factory=list)
    train_head_mass: list = field(default_factory=list)
    rollout_head_mass: list = field(default_factory=list)
    train_tail: list = field(default_factory=list)
    rollout_tail: list = field(default_factory=list)
    tail_ratio: list = field(default_factory=list)
    alpha: list = field(default_factory=list)
    weight: list = field(default_factory=list)

    def stacked(self) -> "DenseResult":
        return DenseResult(**{name: torch.stack(values) for name, values in vars(self).items()})


def masked_dot(coefficients: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """``sum c log p`` where an impossible token under a zero coefficient adds nothing."""
    return torch.where(coefficients == 0, 0.0, coefficients * log_probs).sum()


def reference(batch: DenseBatch, weight: Weight, *, eps: float = EPS) -> DenseResult:
    """Loss, gradient and every intermediate of each token, one token and one full vocabulary at a time."""
    result = DenseResult()
    active = torch.ones_like(batch.advantages, dtype=torch.bool) if batch.active is None else batch.active
    for row, ids in enumerate(batch.token_ids.tolist()):
        sampled, head = ids[0], [i for i in ids[1:] if i >= 0]
        logits = batch.train_logits[row].detach().double().requires_grad_()
        log_q = batch.rollout_log_probs[row].double()
        vocabulary = torch.arange(len(logits))
        in_head = torch.isin(vocabulary, torch.tensor(head, dtype=torch.long))

        log_p = torch.log_softmax(torch.where(in_head, logits, -torch.inf) if batch.complete else logits, dim=-1)
        p, q = log_p.detach().exp(), log_q.exp()
        train_tail, rollout_tail = 1 - p[in_head].sum(), 1 - q[in_head].sum()
        rho = rollout_tail.clamp(min=eps) / train_tail.clamp(min=eps)
        if batch.complete:
            rho = torch.ones_like(rho)

        q_hat = torch.where(in_head, q, 0.0 if batch.complete else rho * p)
        present = q_hat > 0
        centre = torch.where(present, q_hat * weight(p / torch.where(present, q_hat, 1.0)), 0.0)
        sampled_weight = weight(p[sampled] / q[sampled])
        advantage = batch.advantages[row].double() if active[row] else torch.zeros((), dtype=torch.float64)
        one_hot = torch.zeros_like(p)
        one_hot[sampled] = sampled_weight
        surrogate = -advantage * (masked_dot(one_hot, log_p) - masked_dot(centre, log_p))
        (gradient,) = torch.autograd.grad(surrogate, logits)

        # The estimator's value leaves the tail out of the sum: the tail's score is minus the head's, its log-probs not.
        alpha = rho * weight(1 / rho)
        difference = torch.where(in_head, centre - alpha * p, 0.0)
        correction = masked_dot(difference, log_p.detach())
        result.gradient.append(gradient)
        result.loss.append(-advantage * (masked_dot(one_hot, log_p.detach()) - correction))
        result.correction.append(correction)
        result.coefficient_l1.append(difference.abs().sum())
        result.train_head_mass.append(p[in_head].sum())
        result.rollout_head_mass.append(q[in_head].sum())
        result.train_tail.append(train_tail)
        result.rollout_tail.append(rollout_tail)
        result.tail_ratio.append(rho)
        result.alpha.append(alpha)
        result.weight.append(sampled_weight)
    return result.stacked()


def estimator_inputs(batch: DenseBatch, logits: torch.Tensor | None = None) -> ScoreCenteringInputs:
    """What the estimator is given of a batch; train log-probs differentiate in ``logits`` (the batch's if None)."""
    logits = batch.train_logits if logits is None else logits
    score = dense_support_log_probs if batch.complete else dense_log_probs
    train = score(logits, batch.token_ids)
    rollout = gathered(batch.rollout_log_probs, batch.token_ids, unused=-torch.inf)
    return ScoreCenteringInputs(
        train_log_probs=train[:, 0],
        train_head_log_probs=train[:, 1:],
        rollout_log_probs=rollout[:, 0],
        rollout_head_log_probs=rollout[:, 1:],
        head_mask=batch.head_mask,
        advantages=batch.advantages,
        active=batch.active,
        complete_head=batch.complete,
    )


def gathered(values: torch.Tensor, token_ids: torch.Tensor, *, unused: float = 0.0) -> torch.Tensor:
    """``values [T, V]`` at ``token_ids [T, N]``; ids of -1 give ``unused``."""
    token_ids = token_ids.long()
    return torch.where(token_ids >= 0, values.gather(1, token_ids.clamp(min=0)), unused)


def dense_log_softmax(logits: torch.Tensor, *, vocab_size: int | None = None, temperature: float = 1.0) -> torch.Tensor:
    """float64 log-probs [T, vocab_size] over the true vocabulary."""
    return torch.log_softmax(logits.double()[:, :vocab_size] / temperature, dim=-1)


def dense_log_probs(logits: torch.Tensor, token_ids: torch.Tensor, **options) -> torch.Tensor:
    """float64 log-probs [T, N] of ``token_ids``, normalised over the true vocabulary."""
    return gathered(dense_log_softmax(logits, **options), token_ids)


def entropy_of(log_probs: torch.Tensor) -> torch.Tensor:
    """Entropy [T] of ``log_probs [T, V]``; an impossible token adds nothing."""
    possible = log_probs > -torch.inf
    return -torch.where(possible, log_probs.exp() * torch.where(possible, log_probs, 0.0), 0.0).sum(dim=-1)


def dense_entropy(logits: torch.Tensor, **options) -> torch.Tensor:
    """float64 entropy [T] over the true vocabulary."""
    return entropy_of(dense_log_softmax(logits, **options))


def dense_support_log_probs(logits: torch.Tensor, token_ids: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """float64 log-probs [T, 1+K] under the distribution over the support in columns 1.., row by row."""
    rows = []
    for row, ids in zip(logits.double() / temperature, token_ids.long(), strict=True):
        support = ids[1:][ids[1:] >= 0]
        total = row[support].logsumexp(dim=0) if len(support) else torch.zeros((), dtype=torch.float64)
        scores = [row[i] - total if i >= 0 and len(support) else row.new_zeros(()) for i in ids.tolist()]
        rows.append(torch.stack(scores))
    return torch.stack(rows) if rows else logits.double()[:, :1].expand(0, token_ids.shape[1])


def dense_support_entropy(logits: torch.Tensor, token_ids: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """float64 entropy [T] of the distribution over the support."""
    log_probs = dense_support_log_probs(logits, token_ids, temperature=temperature)[:, 1:]
    return -torch.where(token_ids[:, 1:] >= 0, log_probs.exp() * log_probs, 0.0).sum(dim=-1)
