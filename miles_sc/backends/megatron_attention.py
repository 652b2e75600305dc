"""Attention and rotary positions of a Megatron model for every context-parallel layout.

Megatron's own attention serves one process; Transformer Engine's serves the zigzag layouts on CUDA. This one takes the
positions of a :class:`~miles_sc.parallel.context.ContextMap` and serves all of them, on any device.
"""

import math

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class GatheredAttention(MegatronModule):
    """Causal attention of this rank's queries over the keys of its whole context-parallel group.

    Forward gathers keys and values over the group, backward scatters the sum of their gradients.
    """

    def __init__(self, config, softmax_scale: float | None = None, pg_collection=None, **unused: object) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.context_group = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **unused: object) -> Tensor:
        """Args:
        query: ``[S, B, heads, D]``.
        key, value: ``[S, B, groups, D]``.
        attention_mask: bool ``[B, S, size * S]``, true where a query sees a key.
        """
        if self.context_group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(x, group=self.context_group) for x in (key, value))
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [B, heads, S, D]
        seen = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask[:, None], scale=self.softmax_scale, enable_gqa=True
        )
        return seen.permute(2, 0, 1, 3).flatten(2)


class RotaryAtPositions(torch.nn.Module):
    """Rotary angles at given positions; Megatron's own counts on from the rank's first token."""

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__()
        self.inverse_frequencies = inverse_frequencies

    def forward(self, position_ids: Tensor, *unused: object, **also_unused: object) -> Tensor:
        """``[B, S]`` -> ``[S, B, 1, D]``."""
        angles = position_ids.T[:, :, None].float() * self.inverse_frequencies.to(position_ids.device)
        return torch.cat([angles, angles], dim=-1)[:, :, None]
