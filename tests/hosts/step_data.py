"""A step's numbers, made up: what a trainer holds of four samples, and the logits of their tokens."""

import numpy as np

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
    heads[2][3:5], head_log_probs[2][3:5] = -1, -np.inf
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
