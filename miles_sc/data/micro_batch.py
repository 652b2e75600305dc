"""One rank's tensors for one forward pass: a padded batch, and where in it the response rows are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from miles_sc.data.conversion import TrainData
from miles_sc.loss.batch import LossBatch


@dataclass(frozen=True)
class MicroBatch:
    """Attributes:
    input_ids: int64 ``[B, L]``, right-padded, so that under a causal mask no token sees padding.
    rows: int64 ``[T]``, positions in the flattened ``[B * L]`` whose logits predict a response token.
    loss: the same T rows for the loss.
    samples: ``(sample_index, response_length)`` of each sequence, for error messages.
    """

    input_ids: Tensor
    rows: Tensor
    loss: LossBatch
    samples: tuple[tuple[int, int], ...]

    def describe(self, row: int) -> str:
        """Which token a row is."""
        for index, length in self.samples:
            if row < length:
                return f"sample {index}, response token {row}"
            row -= length
        return "no sample"


def build_micro_batch(data: TrainData, members: Sequence[int], device: torch.device, *, pad_token_id: int) -> MicroBatch:
    """Tensors of some samples of a shard.

    Args:
        data: a :class:`~miles_sc.data.sharding.Shard`'s; may also hold ``old_log_probs`` and ``ref_log_probs``.
        members: positions in ``data``; none gives one padding token and T = 0, so that the rank still takes part in every
            collective.
    """
    sequences = [data["tokens"][i] for i in members] or [np.array([pad_token_id], np.int32)]
    width = max(sequence.size for sequence in sequences)
    input_ids = np.full((len(sequences), width), pad_token_id, np.int64)
    for place, sequence in enumerate(sequences):
        input_ids[place, : sequence.size] = sequence

    lengths = [data["response_lengths"][i] for i in members]
    # logits at position t predict token t + 1
    rows = [
        place * width + np.arange(sequences[place].size - length - 1, sequences[place].size - 1)
        for place, length in enumerate(lengths)
    ]
    columns = _Columns(data, members, lengths, device)
    loss = LossBatch(
        token_ids=columns.join([sequences[place][sequences[place].size - n :] for place, n in enumerate(lengths)], torch.int64),
        weights=columns.per_sample("row_weights"),
        active=columns.of("loss_masks", torch.bool),
        advantages=columns.per_sample("rewards"),
        rollout_log_probs=columns.of("rollout_log_probs", torch.float32),
        candidate_ids=columns.candidate_ids(),
        candidate_log_probs=columns.of("rollout_topk_log_probs", torch.float32),
        old_log_probs=columns.of("old_log_probs", torch.float32),
        ref_log_probs=columns.of("ref_log_probs", torch.float32),
    )
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        rows=columns.join(rows, torch.int64),
        loss=loss,
        samples=tuple((data["sample_indices"][i], length) for i, length in zip(members, lengths, strict=True)),
    )


@dataclass(frozen=True)
class _Columns:
    """Joins the members' entries of a train-data key into one tensor of T rows."""

    data: TrainData
    members: Sequence[int]
    lengths: list[int]
    device: torch.device

    def join(self, parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        joined = np.concatenate(parts) if parts else np.empty(0, np.float32)
        return torch.from_numpy(joined).to(self.device, dtype)

    def of(self, key: str, dtype: torch.dtype) -> Tensor | None:
        if key not in self.data:
            return None
        parts = [self.data[key][i] for i in self.members]
        return self.join(parts or [self._nothing(key)], dtype)

    def per_sample(self, key: str) -> Tensor:
        values = np.array([self.data[key][i] for i in self.members], np.float32)
        return torch.from_numpy(np.repeat(values, self.lengths)).to(self.device)

    def candidate_ids(self) -> Tensor | None:
        if "rollout_topk_log_probs" not in self.data:
            return None
        parts = [self._candidate_ids(i) for i in self.members]
        return self.join(parts or [self._nothing("rollout_topk_log_probs")], torch.int64)

    def _candidate_ids(self, i: int) -> np.ndarray:
        dense = self.data["rollout_topk_token_ids"][i]
        if dense is not None:
            return dense
        # compact form: the first `length` ids of each row's support
        lengths, offsets = self.data["rollout_topk_lengths"][i], self.data["rollout_sampling_mask_offsets"][i]
        ids, width = self.data["rollout_sampling_mask_ids"][i], self.data["rollout_topk_log_probs"][i].shape[1]
        places = offsets[:-1, None] + np.arange(width)
        used = np.arange(width) < lengths[:, None]
        return np.where(used, ids[np.where(used, places, 0)], -1)

    def _nothing(self, key: str) -> np.ndarray:
        shapes = [value.shape[1:] for value in self.data[key] if value is not None]
        return np.empty((0, *(shapes[0] if shapes else ())), np.float32)
