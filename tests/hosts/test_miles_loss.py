"""One training step through Miles's real functions on gloo, against the inner ring on the same numbers in one process."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from miles_sc import ScoreCenteringConfig, ScoreCenteringInputs, score_centering_loss, selected_log_probs
from tests.distributed.launch import launch
from tests.hosts.miles_host import needs_miles, on_the_cpu, run_of

pytestmark = needs_miles

VOCAB, PADDED, K, PAD_MULTIPLIER = 11, 12, 4, 4
TOTAL, RESPONSE = [9, 5, 14, 6], [4, 2, 9, 5]
LAYOUTS = [("thd", False), ("thd", True), ("bshd", False), ("bshd", True)]


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


def one_rank(run, tensor_size, context_size):
    """In each process: Miles's groups, iterator, batch and loss; the loss, where its gradient went, and the step's metrics."""
    on_the_cpu()
    from miles.backends.training_utils.cp_utils import slice_with_cp
    from miles.backends.training_utils.data import DataIterator, get_batch
    from miles.backends.training_utils.log_utils import aggregate_train_losses
    from miles.backends.training_utils.loss import loss_function

    state = miles_groups(tensor_size, context_size)
    data = local_data(run)
    iterator = DataIterator(data, micro_batch_size=2)
    tables = [torch.tensor(table) for table in logits_of()]
    gradients, losses, logs = [torch.zeros(total, PADDED) for total in TOTAL], [], []
    for first in (0, 2):
        batch = get_batch(
            iterator,
            ["tokens", "multimodal_train_inputs", "total_lengths", "response_lengths", "loss_masks", "advantages",
             "rollout_log_probs", "ref_log_probs", "max_seq_lens", "rollout_mask_sums"],
            PAD_MULTIPLIER, run.qkv_format, allgather_cp=run.allgather_cp,
        )  # fmt: skip
        # every token's row of the whole vocabulary, laid out as Miles lays out tokens; its padding reads row 0
        places = [torch.arange(len(table)) + 1 + sum(TOTAL[:i]) for i, table in enumerate(tables)]
        local = local_places(run, batch, places[first : first + 2], state, slice_with_cp)
        assert local.shape == batch["tokens"].shape
        joined = torch.cat([torch.zeros(1, PADDED), *tables])
        width = PADDED // tensor_size
        columns = slice(state.tp.rank * width, (state.tp.rank + 1) * width)
        logits = joined[local][..., columns].clone().requires_grad_()
        loss, _, log = loss_function(
            run, batch, num_microbatches=1, logits=logits, apply_megatron_loss_scaling=False, num_rollouts=1
        )
        loss.backward()
        losses.append(loss.detach())
        logs.append(log)
        spread = torch.zeros(sum(TOTAL) + 1, PADDED)
        spread[:, columns].index_add_(0, local.flatten(), logits.grad.flatten(0, 1))
        for i, gradient in enumerate(gradients):
            gradient += spread[places[i]]
    return sum(losses), gradients, aggregate_train_losses(logs, None)


def miles_groups(tensor_size, context_size):
    from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    rank, alone = dist.get_rank(), GroupInfo(rank=0, size=1, group=None)
    tensor = [dist.new_group([c * tensor_size + t for t in range(tensor_size)]) for c in range(context_size)]
    context = [dist.new_group([c * tensor_size + t for c in range(context_size)]) for t in range(tensor_size)]
    t, c = rank % tensor_size, rank // tensor_size
    state = ParallelState(
        intra_dp=GroupInfo(rank=0, size=1, group=dist.new_group([rank], use_local_synchronization=True)),
        intra_dp_cp=GroupInfo(rank=c, size=context_size, group=context[t]),
        cp=GroupInfo(rank=c, size=context_size, group=context[t]),
        tp=GroupInfo(rank=t, size=tensor_size, group=tensor[c]),
        pp=alone, ep=alone, etp=alone, indep_dp=alone,
    )  # fmt: skip
    set_parallel_state(state)
    return state


def local_data(run):
    """As Miles's trainer holds it: lists of tensors, the per-token ones sliced by its own context parallelism."""
    from miles.backends.training_utils.cp_utils import slice_log_prob_with_cp
    from miles.backends.training_utils.parallel import get_parallel_state

    data = rollout_data()
    longest = -(-max(TOTAL) // 16) * 16
    lengths = [longest] * len(TOTAL) if run.qkv_format == "bshd" else None
    held = {**data, "max_seq_lens": lengths}
    held["tokens"] = [torch.tensor(tokens) for tokens in data["tokens"]]
    held["loss_masks"] = [torch.tensor(mask, dtype=torch.int) for mask in data["loss_masks"]]
    for key in ("rollout_log_probs", "ref_log_probs", "advantages"):
        whole = [torch.tensor(values, dtype=torch.float32) for values in data[key]]
        if get_parallel_state().cp.size > 1:
            whole = [
                slice_log_prob_with_cp(values, TOTAL[i], RESPONSE[i], run.qkv_format, longest)
                for i, values in enumerate(whole)
            ]
        held[key] = whole
    held["rollout_mask_sums"] = torch.stack([mask.sum() for mask in held["loss_masks"]]).float()
    return held


def local_places(run, batch, places, state, slice_with_cp):
    """A per-token list through the very slicing that Miles gives its tokens."""
    if run.qkv_format == "bshd":
        width = batch["max_seq_lens"][0]
        if run.allgather_cp:
            part = width // state.cp.size
            padded = [torch.nn.functional.pad(p, (0, width - len(p))) for p in places]
            return torch.stack([p[state.cp.rank * part : (state.cp.rank + 1) * part] for p in padded])
        return torch.stack([slice_with_cp(p, 0, "bshd", width) for p in places])
    length = batch["tokens"].shape[1]
    if run.allgather_cp:
        joined = torch.cat(places)
        joined = torch.nn.functional.pad(joined, (0, length * state.cp.size - len(joined)))
        return joined.chunk(state.cp.size)[state.cp.rank][None]
    joined = torch.cat([slice_with_cp(p, 0, "thd") for p in places])
    return torch.nn.functional.pad(joined, (0, length - len(joined)))[None]


CASES = [
    *((qkv, gather, 2, 2, {}) for qkv, gather in LAYOUTS),
    *((qkv, gather, 2, 2, {"calculate_per_token_loss": False, "score_centering_is": "tis"}) for qkv, gather in LAYOUTS),
    ("thd", False, 1, 1, {"score_centering_is": "mis", "rollout_temperature": 0.7}),
    ("bshd", False, 1, 1, {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k1", "entropy_coef": 0.01}),
    ("thd", True, 1, 3, {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k1"}),
    ("thd", False, 2, 2, {"recompute_loss_function": True}),
]


@pytest.mark.parametrize(
    ("qkv_format", "allgather_cp", "tensor_size", "context_size", "changes"),
    CASES,
    ids=[f"{q}-{'gather' if g else 'zigzag'}-tp{t}cp{c}-{'-'.join(map(str, o)) or 'plain'}" for q, g, t, c, o in CASES],
)
def test_a_step_of_miles_is_the_inner_rings(tmp_path, qkv_format, allgather_cp, tensor_size, context_size, changes):
    run = run_of(
        **{"qkv_format": qkv_format, "allgather_cp": allgather_cp, "calculate_per_token_loss": True, "vocab_size": VOCAB} | changes
    )
    loss, gradients, metrics = inner_ring(run, rollout_data())
    results = launch(one_rank, tensor_size * context_size, tmp_path, run, tensor_size, context_size)

    # tensor-parallel ranks hold columns, context-parallel ranks rows; each of the latter a share of the loss
    shares = [results[c * tensor_size][0] for c in range(context_size)]
    torch.testing.assert_close(sum(shares).double(), loss, rtol=1e-6, atol=1e-6)
    for i, expected in enumerate(gradients):
        whole = sum(result[1][i] for result in results)
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)
        assert not whole[:, VOCAB:].any()

    logged = results[0][2]
    count = sum(RESPONSE) - 2 if run.calculate_per_token_loss else len(RESPONSE)
    assert logged["loss"] == pytest.approx(float(loss) / count, rel=1e-5)
    masks = [torch.tensor(mask) > 0 for mask in rollout_data()["loss_masks"]]
    masses = torch.cat([own["sc_train_head_mass"][mask] for own, mask in zip(metrics, masks, strict=True)])
    assert logged["sc_train_head_mass_min"] == pytest.approx(float(masses.min()), rel=1e-5)
    if run.calculate_per_token_loss:
        assert logged["sc_train_head_mass"] == pytest.approx(float(masses.mean()), rel=1e-5)
    assert all(result[2] == pytest.approx(logged, rel=1e-5) for result in results)
