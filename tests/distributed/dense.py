"""What a step of the score_centering loss must come to: every response token by itself, whole vocabulary, float64, no layout."""

from dataclasses import dataclass

import numpy as np
import torch

from tests.loss.oracle import DenseBatch, reference, weight_function

# q of a head is about 1/5 a token and p 1/37: bounds that clip some weights and leave others
BOUNDS = {"tis_clip": 0.3, "mis_low": 0.1, "mis_high": 0.8}
TEMPERATURE, ENTROPY_COEF, KL_COEF = 0.9, 0.05, 0.2


@dataclass(frozen=True)
class Rows:
    """The response tokens of some samples one after the other, as their train data has them.

    token_ids int64 [R, 1+K]; head_log_probs [R, K]; the rest [R], all floats float32; ``before`` and ``places`` are the token
    that each is predicted from and its position.
    """

    before: torch.Tensor
    places: torch.Tensor
    token_ids: torch.Tensor
    weights: torch.Tensor
    active: torch.Tensor
    advantages: torch.Tensor
    rollout_log_probs: torch.Tensor
    head_log_probs: torch.Tensor
    ref_log_probs: torch.Tensor


@dataclass(frozen=True)
class Step:
    """Loss of a step, its gradient [R, V] by logits, the sum of its terms' absolute gradients, and the reduced metrics."""

    loss: torch.Tensor
    gradient: torch.Tensor
    size: torch.Tensor
    metrics: dict[str, float]


def rows_of(data, *, per_token: bool) -> Rows:
    """Sample by sample, token by token."""
    active_tokens = [int(mask.sum()) for mask in data["loss_masks"]]
    samples_with_some = sum(n > 0 for n in active_tokens)
    rows = []
    for i, tokens in enumerate(data["tokens"]):
        response = data["response_lengths"][i]
        prompt = len(tokens) - response
        for j in range(response):
            weight = 1 / sum(active_tokens) if per_token else 1 / samples_with_some / max(active_tokens[i], 1)
            ids = [tokens[prompt + j], *data["rollout_topk_token_ids"][i][j]]
            scalars = [data[name][i][j] for name in ("rollout_log_probs", "rollout_topk_log_probs", "ref_log_probs")]
            own = (tokens[prompt + j - 1], prompt + j - 1, ids, weight, data["loss_masks"][i][j], data["rewards"][i])
            rows.append((*own, *scalars))
    long, boolean, single = np.int64, np.bool_, np.float32
    dtypes = (long, long, long, single, boolean, single, single, single, single)
    columns = zip(*rows, strict=True)
    return Rows(*(torch.from_numpy(np.array(column, dtype)) for column, dtype in zip(columns, dtypes, strict=True)))


def dense_step(logits: torch.Tensor, rows: Rows, importance: str, *, filtered: bool, entropy: bool, kl: str | None) -> Step:
    """The step that ``logits [R, V]``, already rounded as the model rounds them, lead to.

    kl: kind of the reference KL, "" for none; "unbiased k2" weights it by p/q.
    """
    rows_of_r, head = torch.arange(len(logits)), rows.token_ids[:, 1:]
    share = torch.where(rows.active, rows.weights.double(), 0.0)
    q_log = torch.full(logits.shape, -torch.inf, dtype=torch.float64)
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    for row in rows_of_r:
        for token, value in zip(head[row], rows.head_log_probs[row], strict=True):
            if token >= 0:
                q_log[row, token], kept[row, token] = value.double(), True
        q_log[row, rows.token_ids[row, 0]] = rows.rollout_log_probs[row].double()
    scaled = logits.double() / TEMPERATURE
    centred = reference(
        DenseBatch(scaled, q_log, rows.token_ids, rows.advantages, rows.active, complete=filtered),
        weight_function(importance, **BOUNDS),
    )
    policy = share[:, None] * centred.gradient / TEMPERATURE
    gradients, per_token, metrics = [policy], centred.loss, {}

    # a leaf for each of the two normalisations that a model may be asked for
    leaf, full_leaf = (logits.to(torch.float64, copy=True).requires_grad_() for _ in range(2))
    full = torch.log_softmax(full_leaf / TEMPERATURE, dim=1)[rows_of_r, rows.token_ids[:, 0]]
    sampled_from = torch.log_softmax((leaf / TEMPERATURE).masked_fill(~kept & filtered, -torch.inf), dim=1)
    sampled = sampled_from[rows_of_r, rows.token_ids[:, 0]]
    if entropy:
        possible = sampled_from > -torch.inf
        p_log_p = torch.where(possible, sampled_from.exp() * sampled_from.masked_fill(~possible, 0.0), 0.0)
        bonus = -p_log_p.sum(dim=1)
        gradients += _gradients(-ENTROPY_COEF * share * bonus, leaf)
        per_token, metrics["entropy_loss"] = per_token - ENTROPY_COEF * bonus.detach(), bonus
    if kl:
        difference = full - rows.ref_log_probs
        usable = rows.active & (difference.abs() <= 40)
        difference = difference.where(usable, 0.0)
        estimate = {"k2": difference**2 / 2, "k3": torch.exp(-difference) - 1 + difference}[kl.split()[-1]]
        unbiased = kl.startswith("unbiased")
        if unbiased:
            estimate = estimate * torch.exp(sampled - rows.rollout_log_probs)
        gradients += _gradients(KL_COEF * share * estimate, full_leaf, *[leaf] * unbiased)
        per_token = per_token + KL_COEF * estimate.detach()
        metrics |= {"kl_loss": estimate, "kl_invalid_fraction": rows.active & ~usable}
    log_ratio = (sampled - rows.rollout_log_probs).detach()
    metrics |= {
        "loss": per_token,
        "pg_loss": centred.loss,
        "sc_correction": centred.correction,
        "sc_coefficient_l1": centred.coefficient_l1,
        "sc_train_head_mass": centred.train_head_mass,
        "sc_rollout_head_mass": centred.rollout_head_mass,
        "sc_tail_ratio": centred.tail_ratio,
        "sc_importance_weight": centred.weight,
        "sc_tail_floor_fraction": torch.zeros_like(share),
        "sc_weight_clipped_fraction": ((centred.weight - log_ratio.exp()).abs() > 1e-6) & (importance != "none"),
        "train_rollout_logprob_abs_diff": log_ratio.abs(),
        "train_rollout_kl": (torch.exp(log_ratio.clamp(-20, 20)) - 1 - log_ratio.clamp(-20, 20)).clamp(-10, 10),
        "sc_sampled_in_head": kept[rows_of_r, rows.token_ids[:, 0]],
    }
    return Step((share * per_token).sum(), sum(gradients), sum(g.abs() for g in gradients), _reduced(metrics, share))


def _gradients(values: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(values.sum(), leaves, retain_graph=True)


def _reduced(metrics, share) -> dict[str, float]:
    """Means over active tokens and worst cases."""
    counted = share > 0
    means = {name: (share * values.detach().double()).sum().item() for name, values in metrics.items()}
    means["sc_tail_ratio"] /= share.sum().item()  # float32 weights do not sum to one exactly
    for name in ("sc_train_head_mass", "sc_rollout_head_mass"):
        means[f"{name}_min"] = metrics[name][counted].min().item()
    for name in ("sc_tail_ratio", "sc_importance_weight", "train_rollout_logprob_abs_diff"):
        # of fewer than 100 tokens the 99th percentile is the largest
        means[f"{name}_max"] = means[f"{name}_p99"] = metrics[name][counted].max().item()
    weight = metrics["sc_importance_weight"][counted]
    square = (weight**2).sum().item()
    return means | {"sc_ess": weight.sum().item() ** 2 / (len(weight) * square) if square else 0.0}
