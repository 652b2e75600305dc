"""One training step through Miles's real functions, on logits from a table instead of a model's."""

import torch
import torch.distributed as dist

MICRO_BATCH = 2
KEYS = [
    "tokens", "multimodal_train_inputs", "total_lengths", "response_lengths", "loss_masks", "advantages", "rollout_log_probs",
    "ref_log_probs", "max_seq_lens", "rollout_mask_sums",
]  # fmt: skip


def set_parallel_groups(*, tensor, context, data=1):
    """Miles's parallel state over the default group, whose ranks count tensor first and data last."""
    from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    ranks = torch.arange(data * context * tensor).reshape(data, context, tensor)
    me = dist.get_rank()

    def info(groups):
        made = [(group, dist.new_group(group)) for group in groups.tolist()]  # every rank makes every group
        ((mine, group),) = [(members, group) for members, group in made if me in members]
        return GroupInfo(rank=mine.index(me), size=len(mine), group=group)

    alone = GroupInfo(rank=0, size=1, group=None)
    state = ParallelState(
        intra_dp=info(ranks.permute(1, 2, 0).flatten(0, 1)),
        intra_dp_cp=info(ranks.flatten(0, 1).T),
        cp=info(ranks.transpose(1, 2).flatten(0, 1)),
        tp=info(ranks.flatten(0, 1)),
        pp=alone, ep=alone, etp=alone, indep_dp=alone,
    )  # fmt: skip
    set_parallel_state(state)


def step(run, data, tables):
    """Iterator, batches and loss of every micro-batch.

    Args:
        data: this rank's rollout data, as Miles holds it when it trains.
        tables: float32 ``[total, padded vocabulary]`` of each of its samples, the logits of every token.

    Returns:
        The loss, where its gradient went in each table, and the step's metrics.
    """
    from miles.backends.training_utils.data import DataIterator, get_batch
    from miles.backends.training_utils.log_utils import aggregate_train_losses
    from miles.backends.training_utils.loss import loss_function
    from miles.backends.training_utils.parallel import get_parallel_state

    iterator = DataIterator(data, micro_batch_size=MICRO_BATCH)
    totals, padded = [len(table) for table in tables], len(tables[0][0])
    # every token's row of the whole vocabulary, laid out as Miles lays out tokens; its padding reads row 0
    joined = torch.cat([torch.zeros(1, padded), *(torch.as_tensor(table) for table in tables)])
    places = list((torch.arange(sum(totals)) + 1).split(totals))
    tensor = get_parallel_state().tp
    width = padded // tensor.size
    columns = slice(tensor.rank * width, (tensor.rank + 1) * width)
    spread, losses, logs = torch.zeros_like(joined), [], []
    for first in range(0, len(tables), MICRO_BATCH):
        batch = get_batch(iterator, KEYS, run.data_pad_size_multiplier, run.qkv_format, allgather_cp=run.allgather_cp)
        local = _laid_out(run, batch, places[first : first + MICRO_BATCH])
        assert local.shape == batch["tokens"].shape
        logits = joined[local][..., columns].clone().requires_grad_()
        loss, _, log = loss_function(
            run, batch, num_microbatches=1, logits=logits, apply_megatron_loss_scaling=False, num_rollouts=1
        )
        loss.backward()
        losses.append(loss.detach())
        logs.append(log)
        spread[:, columns].index_add_(0, local.flatten(), logits.grad.flatten(0, 1))
    return sum(losses), list(spread[1:].split(totals)), aggregate_train_losses(logs, None)


def _laid_out(run, batch, places):
    """A per-token list through the very slicing that Miles gives its tokens."""
    from miles.backends.training_utils.cp_utils import slice_with_cp
    from miles.backends.training_utils.parallel import get_parallel_state

    context = get_parallel_state().cp
    if run.qkv_format == "bshd":
        width = batch["max_seq_lens"][0]
        if run.allgather_cp:
            part = width // context.size
            padded = [torch.nn.functional.pad(p, (0, width - len(p))) for p in places]
            return torch.stack([p[context.rank * part : (context.rank + 1) * part] for p in padded])
        return torch.stack([slice_with_cp(p, 0, "bshd", width) for p in places])
    length = batch["tokens"].shape[1]
    if run.allgather_cp:
        joined = torch.cat(places)
        joined = torch.nn.functional.pad(joined, (0, length * context.size - len(joined)))
        return joined.chunk(context.size)[context.rank][None]
    joined = torch.cat([slice_with_cp(p, 0, "thd") for p in places])
    return torch.nn.functional.pad(joined, (0, length - len(joined)))[None]
