"""A host's micro-batch as the loss's: its rows where its logits lie, each response row once over the context-parallel group."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles_sc.data.micro_batch import recorded_ids
from miles_sc.loss.batch import LossBatch
from miles_sc.parallel.context import ContextLayout, ContextMap, context_map


@dataclass(frozen=True)
class HostGroups:
    """This process's place in a host's parallel layout; a group of one rank is None.

    Attributes:
        tensor, context: process groups.
        context_rank, context_size: in the latter.
    """

    tensor: dist.ProcessGroup | None
    context: dist.ProcessGroup | None
    context_rank: int
    context_size: int


class HostRows:
    """Where a micro-batch's response rows are: in the logits of this rank, and in the host's own per-token lists.

    Hosts keep per-token lists (advantages, log-probs) in zigzag order, also where logits lie in all-gather order. There those
    scalars cross the context-parallel group once, all lists in one collective; logits and candidates stay where they are.

    Attributes:
        lengths: response tokens of each sample.
        slots: of the logits.
        parts: of each sample's response, the rows that are scored here.
    """

    def __init__(self, run: argparse.Namespace, batch: Mapping[str, Any], logits: Tensor, groups: HostGroups) -> None:
        self._groups = groups
        self.lengths: list[int] = [int(n) for n in batch["response_lengths"]]
        total = [int(n) for n in batch["total_lengths"]]
        qkv_format = getattr(run, "qkv_format", "thd")  # Slime packs every micro-batch, and has no flag for it
        packed = qkv_format == "thd"
        allgather = bool(run.allgather_cp) and groups.context_size > 1
        layout = ContextLayout(qkv_format, allgather=allgather, size=groups.context_size)
        # the host pads further than the layout needs, and its logits say how far
        padded = logits.shape[-2] * groups.context_size if not packed or allgather else None
        self.slots = context_map(total, self.lengths, layout, rank=groups.context_rank, padded_length=padded)
        self._lists = self.slots
        if allgather:
            zigzag = ContextLayout(qkv_format, size=groups.context_size)
            padded = int(batch["max_seq_lens"][0]) if not packed else None
            self._lists = context_map(total, self.lengths, zigzag, rank=groups.context_rank, padded_length=padded)
        self.parts = [self._part(place) for place in range(len(self.lengths))]

    def of_lists(self, lists: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """The host's per-token lists, one tensor per sample, as float32 ``[T]`` each in the order of the logits."""
        joined = {name: torch.cat(list(values)).detach().float() for name, values in lists.items()}
        for name, values in joined.items():
            if values.numel() != len(self._lists.rows):
                raise ValueError(
                    f"{name} has {values.numel()} entries on this rank and the micro-batch {len(self._lists.rows)} response "
                    "rows: the host lays its tokens out in a way this plugin does not know"
                )
        return joined if self._lists is self.slots else self._regathered(joined)

    def _regathered(self, joined: dict[str, Tensor]) -> dict[str, Tensor]:
        first = next(iter(joined.values()))
        whole = first.new_zeros(len(joined), sum(self.lengths))
        whole[:, torch.from_numpy(self._lists.response_rows).to(first.device)] = torch.stack(list(joined.values()))
        dist.all_reduce(whole, group=self._groups.context)  # each row is on one rank, so the sum is that row
        mine = torch.from_numpy(self.slots.response_rows).to(first.device)
        return dict(zip(joined, whole[:, mine], strict=True))

    def _part(self, place: int) -> slice | np.ndarray:
        rows = self.slots.response_rows_of(place)
        return slice(None) if len(rows) == self.lengths[place] else rows


def loss_batch(run: argparse.Namespace, batch: Mapping[str, Any], rows: HostRows, device: torch.device) -> LossBatch:
    """The loss's view of a host's batch.

    Args:
        batch: the host's keys: ``unconcat_tokens``, ``total_lengths``, ``response_lengths``, ``loss_masks``, ``advantages``,
            ``rollout_log_probs``, perhaps ``ref_log_probs`` and ``rollout_mask_sums``; and ours.
    """
    names = ("advantages", "rollout_log_probs", *(("ref_log_probs",) if run.use_kl_loss else ()))
    scalars = rows.of_lists({name: batch[name] for name in names})
    masks = [mask[_on(part, mask)] for part, mask in zip(rows.parts, batch["loss_masks"], strict=True)]
    return LossBatch(
        selected_ids=_selected_ids(batch, rows, device),
        weights=_weights(run, batch, masks, device),
        active=torch.cat(masks).to(device).bool(),
        advantages=scalars["advantages"].to(device),
        rollout_log_probs=scalars["rollout_log_probs"].to(device),
        candidate_log_probs=_join(
            [np.asarray(values)[part] for part, values in zip(rows.parts, batch["rollout_topk_log_probs"], strict=True)]
        ).to(device, torch.float32),
        ref_log_probs=scalars["ref_log_probs"].to(device) if run.use_kl_loss else None,
        logit_rows=rows.slots.rows,
    )


def _weights(run: argparse.Namespace, batch: Mapping[str, Any], masks: Sequence[Tensor], device: torch.device) -> Tensor:
    """What the host's own reduction multiplies each row with: 1 per token, or 1 over the trained tokens of its rollout."""
    counts = [len(mask) for mask in masks]
    if run.calculate_per_token_loss:
        return torch.ones(sum(counts), device=device)
    sums = batch.get("rollout_mask_sums")
    if sums is None:
        sums = [mask.sum() for mask in batch["loss_masks"]]
    denominators = torch.stack([torch.as_tensor(value) for value in sums]).to(device, torch.float32).clamp_min(1)
    # without its size this would wait for the device
    return (1 / denominators).repeat_interleave(torch.tensor(counts, device=device), output_size=sum(counts))


def _selected_ids(batch: Mapping[str, Any], rows: HostRows, device: torch.device) -> Tensor:
    """int64 ``[T, 1+K]``; candidates are gathered on the CPU, so that only this rank's rows travel, as int32."""
    responses = [tokens[len(tokens) - n :] for tokens, n in zip(batch["unconcat_tokens"], rows.lengths, strict=True)]
    sampled = torch.cat([tokens[_on(part, tokens)] for tokens, part in zip(responses, rows.parts, strict=True)])
    candidates = _join([recorded_ids(batch, place, part) for place, part in enumerate(rows.parts)])
    return torch.cat([sampled[:, None].to(device), candidates.to(device)], dim=1)


def _join(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _on(rows: slice | np.ndarray, like: Tensor) -> slice | Tensor:
    return rows if isinstance(rows, slice) else torch.from_numpy(rows).to(like.device)


def describe_row(slots: ContextMap, sample_indices: Sequence[Any] | None, row: int) -> str:
    """Which sample and token a row is."""
    sample, token = slots.sample_and_token(row)
    name = sample if sample_indices is None else sample_indices[sample]
    return f"sample {name}, response token {token}"
