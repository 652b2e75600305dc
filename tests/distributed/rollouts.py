"""Train data of a rollout that never took place: random tokens, candidates from a random sampler, every edge of lengths."""

import numpy as np

from miles_sc.data.conversion import TrainData

# prompt, response: an empty response, one shorter than any chunk, odd lengths, a prompt that fills the first ranks alone
LENGTHS = ((3, 4), (5, 0), (1, 1), (9, 2), (2, 7), (4, 3), (6, 5), (2, 2))


def train_data(*, vocab_size: int, k: int, seed: int = 0, filtered: bool = False, lengths=LENGTHS) -> TrainData:
    """Per sample: ``tokens``, masks with an observation token, candidates with the sampled token inside or outside the head.

    Args:
        filtered: the candidates are the whole distribution (a replayed support of varying size), and dense.
    """
    random = np.random.default_rng(seed)
    columns: dict[str, list] = {name: [] for name in _COLUMNS}
    for index, (prompt, response) in enumerate(lengths):
        ids = np.stack([random.permutation(vocab_size)[:k] for _ in range(response)]) if response else np.zeros((0, k), int)
        kept = random.integers(1, k + 1, response) if filtered else np.full(response, k)
        used = np.arange(k) < kept[:, None]
        mass = random.dirichlet(np.ones(k), response) if response else np.zeros((0, k))
        mass = np.where(used, mass, 0)
        mass /= np.maximum(mass.sum(axis=1, keepdims=True), 1e-30) * (1.0 if filtered else 1.2)
        log_mass = np.log(np.where(used, mass, 1.0))
        inside = random.random(response) < (1.0 if filtered else 0.7)
        place = (random.random(response) * kept).astype(int)
        rows = np.arange(response)
        outside = np.array([np.setdiff1d(np.arange(vocab_size), row)[0] for row in ids], int).reshape(response)
        sampled = np.where(inside, ids[rows, place], outside)
        mask = np.ones(response, np.uint8)
        if response > 3:
            mask[1] = 0  # an observation: whatever stands in its row
        columns["tokens"].append(np.concatenate([random.integers(0, vocab_size, prompt), sampled]).astype(np.int32))
        columns["response_lengths"].append(response)
        columns["loss_masks"].append(mask)
        columns["rewards"].append(float(random.normal()))
        columns["sample_indices"].append(100 + index)
        columns["rollout_log_probs"].append(np.where(inside, log_mass[rows, place], np.log(0.05)).astype(np.float32))
        columns["rollout_topk_token_ids"].append(np.where(used, ids, -1).astype(np.int32))
        columns["rollout_topk_log_probs"].append(np.where(used, log_mass, -np.inf).astype(np.float32))
        columns["ref_log_probs"].append(random.normal(-2, 0.5, response).astype(np.float32))
        columns["old_log_probs"].append(random.normal(-2, 0.5, response).astype(np.float32))
    return columns


_COLUMNS = (
    "tokens", "response_lengths", "loss_masks", "rewards", "sample_indices", "rollout_log_probs", "rollout_topk_token_ids",
    "rollout_topk_log_probs", "ref_log_probs", "old_log_probs",
)  # fmt: skip
