"""One rollout over data-parallel ranks and optimizer steps, planned so that every rank runs the same number of passes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles_sc.data.conversion import TrainData
from miles_sc.loss.reduction import row_weights
from miles_sc.parallel.context import ONE_RANK, ContextLayout


@dataclass(frozen=True)
class Shard:
    """What one data-parallel rank trains on. Ray carries the arrays without copying; they arrive read-only.

    Attributes:
        data: this rank's entries of every train-data key, and ``row_weights`` (the weight of each active row in its step).
        steps: per optimizer step the micro-batches, each a list of positions in ``data``; a micro-batch may be empty where
            another rank has more.
    """

    data: TrainData
    steps: list[list[list[int]]]


def shard(
    data: TrainData,
    *,
    world_size: int,
    global_batch_size: int,
    per_token: bool,
    micro_batch_size: int = 1,
    max_tokens: int | None = None,
    layout: ContextLayout = ONE_RANK,
) -> list[Shard]:
    """Splits train data.

    Args:
        global_batch_size: samples per optimizer step, over all ranks; must divide the rollout.
        per_token: reduction, see :func:`miles_sc.loss.reduction.row_weights`.
        micro_batch_size: samples per forward pass; not used with ``max_tokens``.
        max_tokens: tokens per forward pass and rank, padding included (a longer sample passes alone).
        layout: how they lie on a rank.

    Raises:
        ValueError: a batch size that does not divide.
    """
    samples = len(data["tokens"])
    for name, value in (("world_size", world_size), ("--global-batch-size", global_batch_size)):
        if value < 1:
            raise ValueError(f"{name} {value}: give at least 1")
    if samples % global_batch_size:
        raise ValueError(
            f"--global-batch-size {global_batch_size} does not divide the rollout's {samples} samples: set it to a divisor "
            "(prompts x samples per prompt / optimizer steps)"
        )
    if global_batch_size % world_size:
        raise ValueError(f"--global-batch-size {global_batch_size} does not divide over {world_size} data-parallel ranks")
    lengths = [tokens.size for tokens in data["tokens"]]
    owned: list[list[int]] = [[] for _ in range(world_size)]
    steps: list[list[list[list[int]]]] = [[] for _ in range(world_size)]
    weights = np.zeros(samples)
    for start in range(0, samples, global_batch_size):
        batch = range(start, start + global_batch_size)
        weights[start : start + global_batch_size] = row_weights([data["loss_masks"][i] for i in batch], per_token=per_token)
        parts = [_plan(part, lengths, micro_batch_size, max_tokens, layout) for part in _deal(batch, lengths, world_size)]
        passes = max(len(part) for part in parts)
        for rank, part in enumerate(parts):
            first = len(owned[rank])
            owned[rank] += [i for micro_batch in part for i in micro_batch]
            steps[rank].append(_renumber(part, first) + [[] for _ in range(passes - len(part))])
    columns = data | {"row_weights": weights.tolist()}
    return [
        Shard({name: [column[i] for i in owned[rank]] for name, column in columns.items()}, steps[rank])
        for rank in range(world_size)
    ]


def _deal(batch: Sequence[int], lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """The same number of samples for every rank, long ones dealt back and forth so that the tokens come out even."""
    by_length = sorted(batch, key=lambda i: -lengths[i])
    parts: list[list[int]] = [[] for _ in range(world_size)]
    for place, i in enumerate(by_length):
        turn, seat = divmod(place, world_size)
        parts[seat if turn % 2 == 0 else world_size - 1 - seat].append(i)
    return parts


def _plan(
    part: list[int], lengths: Sequence[int], micro_batch_size: int, max_tokens: int | None, layout: ContextLayout
) -> list[list[int]]:
    """Micro-batches of neighbours in length, so that little is padded. ``part`` comes longest first."""
    micro_batches: list[list[int]] = []
    for i in part:
        wider = [*micro_batches[-1], i] if micro_batches else []
        fits = len(wider) > 1 and (
            len(wider) <= micro_batch_size
            if max_tokens is None
            else layout.tokens_per_rank([lengths[member] for member in wider]) <= max_tokens
        )
        if fits:
            micro_batches[-1].append(i)
        else:
            micro_batches.append([i])
    return micro_batches


def _renumber(micro_batches: list[list[int]], first: int) -> list[list[int]]:
    numbers = iter(range(first, first + sum(len(m) for m in micro_batches)))
    return [[next(numbers) for _ in micro_batch] for micro_batch in micro_batches]
