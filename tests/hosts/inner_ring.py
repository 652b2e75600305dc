"""A step's numbers, and its loss, gradient and metrics from the public calls alone: what a host's step is held against."""

import numpy as np
import torch

from miles_sc import ScoreCenteringConfig, ScoreCenteringInputs, score_centering_loss, selected_log_probs

VOCAB, PADDED, K, PAD_MULTIPLIER = 11, 12, 4, 4
TOTAL, RESPONSE = [9, 5, 14, 6], [4, 2, 9, 5]


def rollout_data(seed=0):
    """What a trainer holds after ``get_rollout_data`` and its forward passes, whole: no context parallelism yet."""
    rng = np.random.default_rng(seed)
    log_q = [_log_softmax(rng.normal(size=(n, VOCAB))) for n in RESPONSE]
    order = [np.argsort(-values, axis=1) for values in log_q]
    sampled = [rows[np.arange(len(rows)), rng.integers(0, VOCAB, len(rows))] for rows in order]
    tokens = [
        np.concatenate([rng.integers(0, VOCAB, total - n), drawn])
        for total, n, drawn in zip(TOTAL, RESPONSE, sampled, strict=True)
    ]
    masks = [np.ones(n, np.int64) for n in RESPONSE]
    masks[2][3:5] = 0  # an observation
    heads = [rows[:, :K].astype(np.int32) for rows in order]
    head_log_probs = [np.take_along_axis(values, ids, 1) for values, ids in zip(log_q, heads, strict=True)]
    for ids, values in ((heads[2], head_log_probs[2]),):
        ids[3:5], values[3:5] = -1, -np.inf
    return {
        "tokens": tokens,
        "total_lengths": TOTAL,
        "response_lengths": RESPONSE,
        "loss_masks": masks,
        "rollout_log_probs": [values[np.arange(len(drawn)), drawn] for values, drawn in zip(log_q, sampled, strict=True)],
        "ref_log_probs": [rng.normal(-2, 0.3, n) for n in RESPONSE],
        "advantages": [np.full(n, a) for n, a in zip(RESPONSE, (1.5, -0.7, 0.4, -1.1), strict=True)],
        "rollout_topk_token_ids": heads,
        "rollout_topk_log_probs": [values.astype(np.float32) for values in head_log_probs],
        "sample_indices": [7, 8, 9, 10],
    }


def _log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def logits_of(seed=1):
    """float32 ``[total, padded vocabulary]`` of each sample; the padded columns hold what must not count."""
    rng = np.random.default_rng(seed)
    tables = [rng.normal(size=(total, PADDED)).astype(np.float32) for total in TOTAL]
    for table in tables:
        table[:, VOCAB:] = 5.0
    return tables


def inner_ring(run, data):
    """The same loss and its gradient from the public calls alone, and the per-token metrics."""
    config = ScoreCenteringConfig.from_args(run)
    tables = [torch.tensor(table, dtype=torch.float64, requires_grad=True) for table in logits_of()]
    loss, metrics = torch.zeros((), dtype=torch.float64), []
    masks = [torch.tensor(mask, dtype=torch.float64) for mask in data["loss_masks"]]
    for i, table in enumerate(tables):
        n = RESPONSE[i]
        ids = torch.cat([torch.tensor(data["tokens"][i][-n:])[:, None], torch.tensor(data["rollout_topk_token_ids"][i])], dim=1)
        log_p = selected_log_probs(table[-n - 1 : -1], ids, vocab_size=VOCAB, temperature=config.temperature)
        per_token, own = score_centering_loss(
            ScoreCenteringInputs(
                log_p[:, 0], log_p[:, 1:], torch.tensor(data["rollout_log_probs"][i]),
                torch.tensor(data["rollout_topk_log_probs"][i], dtype=torch.float64),
                torch.tensor(data["rollout_topk_token_ids"][i]) >= 0, torch.tensor(data["advantages"][i]), masks[i] > 0,
            ),
            **config.estimator_settings,
        )  # fmt: skip
        if run.use_kl_loss:
            difference = log_p[:, 0] - torch.tensor(data["ref_log_probs"][i])
            per_token = per_token + run.kl_loss_coef * torch.where(masks[i] > 0, difference, 0.0)
        if run.entropy_coef:
            full = torch.log_softmax(table[-n - 1 : -1, :VOCAB] / config.temperature, dim=1)
            per_token = per_token + run.entropy_coef * torch.where(masks[i] > 0, (full.exp() * full).sum(1), 0.0)
        denominator = 1.0 if run.calculate_per_token_loss else masks[i].sum()
        loss = loss + (per_token * masks[i]).sum() / denominator
        metrics.append(own)
    loss.backward()
    return loss.detach(), [table.grad.float() for table in tables], metrics
