"""The process groups that this rank belongs to."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ParallelGroups:
    """None stands for a group of one rank. Ranks count tensor first, then context, then data.

    Attributes:
        tensor: holds one vocabulary; its ranks have the same rows.
        context: holds one micro-batch; its ranks have different rows of the same samples.
        data: holds one optimizer step; its ranks have different samples.
        data_context: both together: everybody with rows of their own, over whom sums are taken.
    """

    tensor: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    data_context: dist.ProcessGroup | None = None


def size_of(group: dist.ProcessGroup | None) -> int:
    """Ranks in a group."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's place in a group."""
    return 0 if group is None else dist.get_rank(group)


def gather_columns(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The whole of a ``[T, V/TP]`` of equal widths, ``[T, V]``, without graph: for checks, never for training."""
    if size_of(group) == 1:
        return values
    parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(size_of(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, dim=1)
