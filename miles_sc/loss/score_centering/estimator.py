"""The score-centering estimator: a pure function of a few tensors (arXiv 2609.20807, Appendix A).

For one token: ``p`` trainer, ``q`` sampler, ``H`` the valid candidates, ``y`` the sampled token, ``A`` the advantage,
``f`` the weight function::

    rho   = max(1 - sum q[H], eps) / max(1 - sum p[H], eps)
    alpha = rho f(1/rho)
    d_i   = q_i f(p_i/q_i) - alpha p_i
    w     = f(p_y/q_y)
    loss  = -A (w log p_y - sum_i d_i log p_i)

Only ``log p_y`` and ``log p_i`` carry gradient. Outside ``H`` the sampler is modelled as ``rho p``; since
``sum_v p_v grad log p_v = 0`` the whole tail folds into the head coefficients, and no other column is ever touched.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_sc.loss.finite_guard import FiniteGuard, raise_on_fault
from miles_sc.loss.score_centering.importance_sampling import ImportanceSampling
from miles_sc.loss.score_centering.importance_sampling import importance_sampling as weight_function

TAIL_EPS = 1e-6
# In float32 a tail below this is rounding (1e-6 of error on 1 - sum p); its ratio says nothing.
READABLE_TAIL = 1e-5
# What an infinite log-ratio counts as in the metrics: beyond any that float32 probabilities can show.
LARGEST_LOG_RATIO = 100.0


@dataclass(frozen=True)
class ScoreCenteringInputs:
    """What the estimator reads, one row per response token.

    Attributes:
        train_log_probs: ``[T]`` log p of the sampled token, with graph.
        train_head_log_probs: ``[T, K]`` log p of the candidates, with graph.
        rollout_log_probs: ``[T]`` log q of the sampled token.
        rollout_head_log_probs: ``[T, K]`` log q of the candidates.
        head_mask: bool ``[T, K]``, the valid candidates.
        advantages: ``[T]``.
        active: bool ``[T]``, the loss mask; None means every token.
        complete_head: the candidates are the sampler's whole distribution and p is normalised over them, so that there is
            no tail: ``rho = 1`` without rounding.
    """

    train_log_probs: Tensor
    train_head_log_probs: Tensor
    rollout_log_probs: Tensor
    rollout_head_log_probs: Tensor
    head_mask: Tensor
    advantages: Tensor
    active: Tensor | None = None
    complete_head: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "complete_head" and not isinstance(value, Tensor) and not (name == "active" and value is None):
                raise ValueError(f"{name} is a {type(value).__name__}: give a tensor")
        rows = self.train_log_probs.shape
        if len(rows) != 1:
            raise ValueError(f"train_log_probs has shape {tuple(rows)}: give one row per token, [T]")
        head = self.train_head_log_probs.shape
        if len(head) != 2 or head[0] != rows[0]:
            raise ValueError(f"train_head_log_probs has shape {tuple(head)}: give [T, K] with T = {rows[0]}")
        wanted = {
            "rollout_log_probs": rows,
            "advantages": rows,
            "active": rows,
            "rollout_head_log_probs": head,
            "head_mask": head,
        }
        for name, shape in wanted.items():
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, wanted {tuple(shape)}: nothing is broadcast here")
        for name in ("head_mask", "active"):
            value = getattr(self, name)
            if value is not None and value.dtype != torch.bool:
                raise ValueError(f"{name} has dtype {value.dtype}: a mask is torch.bool")
        for name in ("train_log_probs", "train_head_log_probs", "rollout_log_probs", "rollout_head_log_probs", "advantages"):
            dtype = getattr(self, name).dtype
            if not dtype.is_floating_point:
                raise ValueError(f"{name} has dtype {dtype}: give a floating-point tensor")


@dataclass(frozen=True)
class _Coefficients:
    """Everything that is constant to the gradient, for one batch of tokens."""

    rho: Tensor  # [T]
    head: Tensor  # [T, K], d
    sampled: Tensor  # [T], w
    log_ratio: Tensor  # [T], log p_y - log q_y
    train_mass: Tensor  # [T]
    rollout_mass: Tensor  # [T]
    unreadable_tail: Tensor  # bool [T]


def score_centering_loss(
    inputs: ScoreCenteringInputs,
    *,
    importance_sampling: str = "none",
    tis_clip: float = 2.0,
    mis_low: float = 0.5,
    mis_high: float = 5.0,
    guard: FiniteGuard | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Score-centered policy-gradient loss of each token, unreduced.

    Args:
        inputs: see :class:`ScoreCenteringInputs`.
        importance_sampling: ``none``, ``tis`` (``min(r, tis_clip)``) or ``mis`` (``r`` inside ``[mis_low, mis_high]``, else 0).
        guard: collects broken tokens on the device for one check per step. Without it the check is made here and now, at
            the price of one host sync on an accelerator.

    Returns:
        ``(loss [T], metrics)``; the metrics are detached ``[T]`` tensors, finite in every row.

    Raises:
        ValueError: bad bounds; without ``guard``, an active token with a NaN or infinite value that matters (the field and
            row are named).
    """
    weights = weight_function(importance_sampling, tis_clip=tis_clip, mis_low=mis_low, mis_high=mis_high)
    inputs = _in_common_precision(inputs)
    trained = inputs.advantages != 0
    if inputs.active is not None:
        trained = trained & inputs.active
    with torch.no_grad():
        coefficients = _coefficients(inputs, weights)
        faults = _faults(inputs, coefficients, trained)
    if guard is None:
        raise_on_fault(faults)
    else:
        guard.add(faults)

    sampled_log_probs = _where_it_counts(inputs.train_log_probs, coefficients.sampled != 0, trained)
    head_log_probs = _where_it_counts(inputs.train_head_log_probs, coefficients.head != 0, trained[:, None])
    correction = (coefficients.head * head_log_probs).sum(dim=1)
    advantages = torch.where(trained, inputs.advantages, 0.0)
    loss = -advantages * (coefficients.sampled * sampled_log_probs - correction)
    loss = torch.where(trained, loss, 0.0)
    with torch.no_grad():
        metrics = _metrics(inputs, coefficients, correction, truncates=importance_sampling != "none")
    return loss, metrics


def _in_common_precision(inputs: ScoreCenteringInputs) -> ScoreCenteringInputs:
    dtype = torch.promote_types(inputs.train_log_probs.dtype, torch.float32)
    return ScoreCenteringInputs(
        train_log_probs=inputs.train_log_probs.to(dtype),
        train_head_log_probs=inputs.train_head_log_probs.to(dtype),
        rollout_log_probs=inputs.rollout_log_probs.to(dtype),
        rollout_head_log_probs=inputs.rollout_head_log_probs.to(dtype),
        head_mask=inputs.head_mask,
        advantages=inputs.advantages.to(dtype).detach(),
        active=inputs.active,
        complete_head=inputs.complete_head,
    )


def _where_it_counts(log_probs: Tensor, carries_weight: Tensor, trained: Tensor) -> Tensor:
    # replaced before the product, so that 0 * -inf forms neither in the loss nor in its gradient; what is broken in a
    # trained row stays broken, for the guard and for everyone who looks at the loss
    return torch.where(carries_weight & (trained | log_probs.isfinite()), log_probs, 0.0)


def _coefficients(inputs: ScoreCenteringInputs, weights: ImportanceSampling) -> _Coefficients:
    p_log = torch.where(inputs.head_mask, inputs.train_head_log_probs, -torch.inf)
    q_log = torch.where(inputs.head_mask, inputs.rollout_head_log_probs, -torch.inf)
    # a NaN candidate has no mass (on a trained token it is a fault and stops the step); what an inactive row holds may be
    # any number, and its coefficient must stay finite to be multiplied by a zero advantage
    p, q = (log_probs.exp().nan_to_num(nan=0.0).clamp(max=1.0) for log_probs in (p_log, q_log))
    train_mass, rollout_mass = p.sum(dim=1), q.sum(dim=1)
    if inputs.complete_head:
        rho = torch.ones_like(train_mass)
        unreadable = torch.zeros_like(rho, dtype=torch.bool)
    else:
        train_tail, rollout_tail = 1 - train_mass, 1 - rollout_mass
        rho = rollout_tail.clamp(min=TAIL_EPS) / train_tail.clamp(min=TAIL_EPS)
        unreadable = torch.minimum(train_tail, rollout_tail) < READABLE_TAIL
    head = torch.where(inputs.head_mask, weights.head(p, q, p_log - q_log) - weights.tail(rho)[:, None] * p, 0.0)
    log_ratio = (inputs.train_log_probs - inputs.rollout_log_probs).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    return _Coefficients(rho, head, weights.sampled(log_ratio), log_ratio, train_mass, rollout_mass, unreadable)


def _faults(inputs: ScoreCenteringInputs, coefficients: _Coefficients, trained: Tensor) -> list[tuple[str, Tensor]]:
    """What must never reach the optimizer, per field: bool ``[T]``. CONTRACT 2."""
    head_is_used = inputs.head_mask & (coefficients.head != 0)

    def nan_or_positive_infinity(log_probs: Tensor) -> Tensor:
        return log_probs.isnan() | log_probs.isposinf()

    broken_train = nan_or_positive_infinity(inputs.train_log_probs)
    zero_train = inputs.train_log_probs.isneginf() & (coefficients.sampled != 0)
    broken_train_head = inputs.head_mask & nan_or_positive_infinity(inputs.train_head_log_probs)
    zero_train_head = head_is_used & inputs.train_head_log_probs.isneginf()
    broken_rollout_head = inputs.head_mask & nan_or_positive_infinity(inputs.rollout_head_log_probs)
    return [
        ("NaN or infinity in advantages", trained & ~inputs.advantages.isfinite()),
        ("NaN or +inf in train_log_probs", trained & broken_train),
        ("-inf in train_log_probs of a token that carries weight", trained & zero_train),
        # -inf too: a token that was sampled had a positive probability
        ("NaN or infinity in rollout_log_probs", trained & ~inputs.rollout_log_probs.isfinite()),
        ("NaN or +inf in train_head_log_probs", trained & broken_train_head.any(dim=1)),
        ("-inf in train_head_log_probs of a candidate that carries weight", trained & zero_train_head.any(dim=1)),
        ("NaN or +inf in rollout_head_log_probs", trained & broken_rollout_head.any(dim=1)),
    ]


def _metrics(inputs: ScoreCenteringInputs, c: _Coefficients, correction: Tensor, *, truncates: bool) -> dict[str, Tensor]:
    measured = torch.ones_like(c.unreadable_tail) if inputs.active is None else inputs.active
    log_ratio = torch.where(measured, c.log_ratio, 0.0).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    clipped = c.sampled != c.log_ratio.exp() if truncates else torch.zeros_like(measured)
    return {
        "sc_correction": correction.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0),
        "sc_train_head_mass": c.train_mass,
        "sc_rollout_head_mass": c.rollout_mass,
        "sc_tail_ratio": torch.where(c.unreadable_tail, 1.0, c.rho),
        "sc_importance_weight": c.sampled,
        "sc_coefficient_l1": c.head.abs().sum(dim=1),
        "sc_tail_floor_fraction": c.unreadable_tail.to(c.rho.dtype),
        "sc_weight_clipped_fraction": clipped.to(c.rho.dtype),
        "train_rollout_logprob_abs_diff": log_ratio.abs(),
        "train_rollout_kl": k3_rollout_to_train(log_ratio),
    }


def k3_rollout_to_train(log_ratio: Tensor) -> Tensor:
    """The k3 estimate of KL(rollout || train) from ``log p - log q`` of sampled tokens, clamped as hosts clamp it."""
    clamped = log_ratio.clamp(-20, 20)
    return (torch.expm1(clamped) - clamped).clamp(-10, 10)
