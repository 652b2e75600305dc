"""One rank's tensors for one forward pass: its tokens in their layout, and where among them the response rows are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_sc.data.conversion import TrainData
from miles_sc.loss.batch import LossBatch
from miles_sc.parallel.context import ONE_RANK, ContextLayout, ContextMap, attention_mask, context_map


@dataclass(frozen=True)
class MicroBatch:
    """Attributes:
    input_ids: int64 ``[B, S]`` of this context-parallel rank.
    position_ids: int64 ``[B, S]``, each token's place in its sample.
    rows: int64 ``[T]``, positions in the flattened ``[B * S]`` whose logits predict a response token.
    loss: the same T rows for the loss.
    sample_indices: of every sample, for error messages.
    layout, maps: how samples lie over the context-parallel group, and the slots of each of its ranks.
    rank: in that group.
    """

    input_ids: Tensor
    position_ids: Tensor
    rows: Tensor
    loss: LossBatch
    sample_indices: tuple[int, ...]
    layout: ContextLayout
    maps: tuple[ContextMap, ...]
    rank: int

    @property
    def slots(self) -> ContextMap:
        """Those of this rank."""
        return self.maps[self.rank]

    def describe(self, row: int) -> str:
        """Which token a row is."""
        sample, token = self.slots.sample_and_token(row)
        return f"sample {self.sample_indices[sample]}, response token {token}"

    def by_sample(self, values: Tensor) -> list[np.ndarray]:
        """``[T]`` as one array per sample with a place for every response token; NaN where another rank holds the row."""
        joined = np.full(int(self.slots.response_lengths.sum()), np.nan, np.float32)
        joined[self.slots.response_rows] = values.float().cpu().numpy()
        return np.split(joined, np.cumsum(self.slots.response_lengths)[:-1]) if self.sample_indices else []

    def attention_mask(self) -> Tensor:
        """bool ``[B, S, size * S]``, true where a query sees a key; the keys of all context-parallel ranks side by side."""
        return torch.from_numpy(attention_mask(self.maps, self.rank)).to(self.input_ids.device)


def build_micro_batch(
    data: TrainData,
    members: Sequence[int],
    device: torch.device,
    *,
    pad_token_id: int,
    layout: ContextLayout = ONE_RANK,
    rank: int = 0,
) -> MicroBatch:
    """Tensors of some samples of a shard.

    Args:
        data: a :class:`~miles_sc.data.sharding.Shard`'s; may also hold ``old_log_probs`` and ``ref_log_probs``, float32 ``[R]``
            of each sample, of which only the rows held here are read.
        members: positions in ``data``; none gives padding alone and T = 0, so that the rank still takes part in every
            collective.
        layout, rank: which of the samples' rows this rank holds.
    """
    tokens = [data["tokens"][i] for i in members]
    lengths = [data["response_lengths"][i] for i in members]
    sizes = [sample.size for sample in tokens]
    maps = tuple(context_map(sizes, lengths, layout, rank=r) for r in range(layout.size))
    mine = maps[rank]
    columns = _Columns(data, members, mine, device)
    loss = LossBatch(
        selected_ids=columns.selected_ids(),
        weights=columns.per_sample("row_weights"),
        active=columns.of("loss_masks", torch.bool),
        advantages=columns.per_sample("rewards"),
        rollout_log_probs=columns.of("rollout_log_probs", torch.float32),
        candidate_log_probs=columns.of("rollout_topk_log_probs", torch.float32),
        old_log_probs=columns.of("old_log_probs", torch.float32),
        ref_log_probs=columns.of("ref_log_probs", torch.float32),
    )
    # padding reads the token that stands behind all others
    joined = np.concatenate([*tokens, np.array([pad_token_id], np.int32)])
    return MicroBatch(
        input_ids=torch.from_numpy(joined[mine.tokens]).to(device, torch.int64),
        position_ids=torch.from_numpy(mine.positions).to(device),
        rows=torch.from_numpy(mine.rows).to(device),
        loss=loss,
        sample_indices=tuple(data["sample_indices"][i] for i in members),
        layout=layout,
        maps=maps,
        rank=rank,
    )


class _Columns:
    """This rank's rows of the members' entries of a train-data key, joined into one tensor of T rows."""

    def __init__(self, data: TrainData, members: Sequence[int], slots: ContextMap, device: torch.device) -> None:
        self.data, self.members, self.device = data, members, device
        rows = [slots.response_rows_of(place) for place in range(len(members))]
        self.counts = [len(part) for part in rows]
        # where a rank holds all rows of a sample, a view of them serves
        whole = slice(None)
        self.rows = [whole if len(part) == n else part for part, n in zip(rows, slots.response_lengths, strict=True)]

    def of(self, key: str, dtype: torch.dtype) -> Tensor | None:
        if key not in self.data:
            return None
        parts = [self._entry(key, i)[rows] for i, rows in zip(self.members, self.rows, strict=True)]
        joined = np.concatenate(parts) if parts else np.empty((0, *self.data[key][0].shape[1:]), np.float32)
        return torch.from_numpy(joined).to(self.device, dtype)

    def _entry(self, key: str, i: int) -> np.ndarray:
        entry, length = self.data[key][i], self.data["response_lengths"][i]
        if len(entry) != length:
            raise ValueError(
                f"sample {self.data['sample_indices'][i]}: {key} has {len(entry)} rows and the response {length} tokens; "
                "whoever filled it must give one row for each"
            )
        return entry

    def per_sample(self, key: str) -> Tensor:
        values = np.array([self.data[key][i] for i in self.members], np.float32)
        return torch.from_numpy(np.repeat(values, self.counts)).to(self.device)

    def selected_ids(self) -> Tensor:
        """int64 ``[T, 1+K]``: the sampled token, then the candidates; written once, where the loss reads them."""
        recorded = "rollout_topk_log_probs" in self.data
        width = self.data["rollout_topk_log_probs"][0].shape[1] if recorded else 0
        ids = np.empty((sum(self.counts), 1 + width), np.int64)
        end = 0
        for i, rows, count in zip(self.members, self.rows, self.counts, strict=True):
            start, end = end, end + count
            tokens, length = self.data["tokens"][i], self.data["response_lengths"][i]
            ids[start:end, 0] = tokens[tokens.size - length :][rows]
            if recorded:
                ids[start:end, 1:] = recorded_ids(self.data, i, rows)
        return torch.from_numpy(ids).to(self.device)


def recorded_ids(data: Mapping[str, Any], i: int, rows: slice | np.ndarray) -> np.ndarray:
    """Candidate ids of some rows of sample i of train data or of a batch of it, int32 ``[rows, K]``, in either form."""
    dense = data.get("rollout_topk_token_ids")
    if dense is not None and dense[i] is not None:
        return dense[i][rows]
    # compact form: the first `length` ids of each row's support
    lengths = data["rollout_topk_lengths"][i][rows]
    offsets, ids = data["rollout_sampling_mask_offsets"][i][:-1][rows], data["rollout_sampling_mask_ids"][i]
    width = data["rollout_topk_log_probs"][i].shape[1]
    used = np.arange(width) < lengths[:, None]
    return np.where(used, ids[np.where(used, offsets[:, None] + np.arange(width), 0)], -1)
