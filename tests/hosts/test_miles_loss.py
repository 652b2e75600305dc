"""One training step through Miles's real functions on gloo, against the inner ring on the same numbers in one process."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import launch
from tests.hosts.inner_ring import PAD_MULTIPLIER, PADDED, RESPONSE, TOTAL, VOCAB, inner_ring, logits_of, rollout_data
from tests.hosts.miles_host import needs_miles, on_the_cpu, run_of

pytestmark = needs_miles

LAYOUTS = [("thd", False), ("thd", True), ("bshd", False), ("bshd", True)]


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
                slice_log_prob_with_cp(values, TOTAL[i], RESPONSE[i], run.qkv_format, longest) for i, values in enumerate(whole)
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
        **{"qkv_format": qkv_format, "allgather_cp": allgather_cp, "calculate_per_token_loss": True, "vocab_size": VOCAB}
        | changes
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
