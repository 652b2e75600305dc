"""Requests decoded together: how they are split into waves, their state while they decode, and what they record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from miles_sc.rollout.engines.native_request import NativeRequest
from miles_sc.rollout.engines.sampling import Draw, SamplerRows

UNIFORMS_PER_REFILL = 64
# Below this share of live rows, copying the cache costs less than decoding the dead ones.
COMPACTION_SHARE = 7 / 8


def split_waves(requests: Sequence[NativeRequest], max_batch_tokens: int) -> list[list[int]]:
    """Indices of requests with something to generate, in waves of rows x (longest prompt + longest answer) <= the
    budget.

    Sorted by length, so that padding stays small and equal prompts meet in one wave. A request that exceeds the budget
    by itself is a wave of its own.
    """
    order = sorted(
        (index for index, request in enumerate(requests) if request.max_new_tokens > 0),
        key=lambda index: (
            len(requests[index].input_ids) + requests[index].max_new_tokens,
            requests[index].input_ids,
        ),
    )
    waves: list[list[int]] = []
    longest_prompt = longest_answer = 0
    for index in order:
        longest_prompt = max(longest_prompt, len(requests[index].input_ids))
        longest_answer = max(longest_answer, requests[index].max_new_tokens)
        if not waves or (len(waves[-1]) + 1) * (longest_prompt + longest_answer) > max_batch_tokens:
            waves.append([])
            longest_prompt, longest_answer = len(requests[index].input_ids), requests[index].max_new_tokens
        waves[-1].append(index)
    return waves


@dataclass(frozen=True)
class Generation:
    """What one request recorded: ``n`` generated tokens, ``H`` reported candidates. Numpy arrays on the host.

    token_ids int32 ``[n]``, log_probs float32 ``[n]``; head_token_ids int32 and head_log_probs float32 ``[n, H]``;
    support_log_probs float32 ``[n, H]``, support_lengths int64 ``[n]``, support_log_probs_of_token float32 ``[n]``, or
    None where no row of the wave was drawn from a support. ``H`` is the widest head of the wave; a request reads its
    own prefix.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    head_token_ids: np.ndarray
    head_log_probs: np.ndarray
    support_log_probs: np.ndarray | None = None
    support_lengths: np.ndarray | None = None
    support_log_probs_of_token: np.ndarray | None = None

    @classmethod
    def empty(cls) -> Generation:
        """Of a request for zero tokens."""
        floats, wide = np.zeros(0, np.float32), np.zeros((0, 0), np.float32)
        ids, wide_ids = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)
        return cls(ids, floats, wide_ids, wide, wide, np.zeros(0, np.int64), floats)


@dataclass
class Batch:
    """State of the ``B`` rows that are still in the batch.

    rows: int64 ``[B]``, each row's place in its wave. remaining: int64 ``[B]``, tokens it may still generate.
    positions: int64 ``[B]``, position of its newest token. attention_mask: int64 ``[B, longest prompt + longest
    answer]``, of which the first ``width`` columns are in the cache. live: bool ``[B]``, False for a finished row not
    yet taken out.
    """

    requests: list[NativeRequest]
    generators: list[np.random.Generator]
    rows: Tensor
    sampler: SamplerRows
    stop_token_ids: Tensor
    remaining: Tensor
    positions: Tensor
    attention_mask: Tensor
    live: Tensor
    live_count: int
    width: int
    head_width: int
    step: int = 0
    _uniforms: Tensor = field(default_factory=lambda: torch.zeros(0))

    @classmethod
    def start(
        cls, requests: list[NativeRequest], generators: list[np.random.Generator], device: torch.device, vocab_size: int
    ) -> Batch:
        lengths = torch.tensor([len(request.input_ids) for request in requests], device=device)
        remaining = torch.tensor([request.max_new_tokens for request in requests], device=device)
        prompt_width = int(lengths.max())
        columns = torch.arange(prompt_width + int(remaining.max()), device=device)
        return cls(
            requests=requests,
            generators=generators,
            rows=torch.arange(len(requests), device=device),
            sampler=_sampler_rows(requests, device),
            stop_token_ids=_stop_matrix(requests, device),
            remaining=remaining,
            positions=lengths - 1,
            attention_mask=(columns >= (prompt_width - lengths)[:, None]).long(),
            live=torch.ones(len(requests), dtype=torch.bool, device=device),
            live_count=len(requests),
            width=prompt_width,
            head_width=max(_head_width(request, vocab_size) for request in requests),
        )

    @property
    def done(self) -> bool:
        return self.live_count == 0

    def next_uniforms(self) -> Tensor:
        """float64 ``[B]``: the next number of each row's own stream, whatever else is in the batch."""
        column = self.step % UNIFORMS_PER_REFILL
        if column == 0:
            block = np.stack([generator.random(UNIFORMS_PER_REFILL) for generator in self.generators])
            self._uniforms = torch.from_numpy(block).to(self.rows.device)
        return self._uniforms[:, column]

    def advance(self, token_ids: Tensor, max_positions: int | None) -> None:
        """Appends one token a row and marks the rows that it finished, by length or by a stop token."""
        self.remaining -= 1
        self.positions += 1
        if max_positions is not None:
            # A dead row may run past its end until it is taken out; its tokens are never recorded.
            self.positions.clamp_(max=max_positions - 1)
        self.live &= (self.remaining > 0) & ~(token_ids[:, None] == self.stop_token_ids).any(dim=-1)
        self.live_count = int(self.live.sum())
        self.width += 1
        self.step += 1

    def leave(self) -> Tensor | None:
        """Takes the finished rows out once they are many: the indices that stay, int64, or None while all stay."""
        if self.live_count > COMPACTION_SHARE * len(self.requests):
            return None
        keep = self.live.nonzero().squeeze(-1)
        kept = keep.tolist()
        self.requests = [self.requests[index] for index in kept]
        self.generators = [self.generators[index] for index in kept]
        self.sampler = self.sampler.select(keep)
        for name in ("rows", "stop_token_ids", "remaining", "positions", "attention_mask", "live", "_uniforms"):
            setattr(self, name, getattr(self, name)[keep])
        return keep


class TokenRecords:
    """Tensors recorded a step at a time for the live rows of a wave, sorted into requests at the end."""

    def __init__(self, requests: Sequence[NativeRequest]):
        self._count = len(requests)
        self._top_width = max(request.top_logprobs_num for request in requests)
        self._support_width = max((request.top_k for request in requests if request.sampling_mask), default=0)
        self._steps: list[tuple[Tensor, ...]] = []

    def append(self, batch: Batch, draw: Draw) -> None:
        """Records the tokens of the rows that were live before them."""
        columns = [batch.rows, draw.token_ids.int(), draw.log_probs]
        # Copies of the prefixes that are reported, since a slice would keep the whole head alive.
        columns.append(draw.head_token_ids[:, : max(self._top_width, self._support_width)].int())
        columns.append(draw.head_log_probs[:, : self._top_width].clone())
        if self._support_width:
            columns.append(draw.support_log_probs[:, : self._support_width].clone())
            columns += [draw.support_lengths, draw.support_log_probs_of_token]
        if batch.live_count < len(batch.requests):
            columns = [column[batch.live] for column in columns]
        self._steps.append(tuple(columns))

    def generations(self) -> Iterator[Generation]:
        """One value a request, in the order of the wave."""
        rows, *columns = (torch.cat(parts) for parts in zip(*self._steps, strict=True))
        order = torch.argsort(rows, stable=True)
        arrays = [column[order].cpu().numpy() for column in columns]
        ends = np.cumsum(torch.bincount(rows, minlength=self._count).cpu().numpy())
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            yield Generation(*(array[start:end] for array in arrays))


def _head_width(request: NativeRequest, vocab_size: int) -> int:
    support = min(request.top_k, vocab_size) if request.from_support else 0
    return max(request.top_logprobs_num, support)


def _sampler_rows(requests: Sequence[NativeRequest], device: torch.device) -> SamplerRows:
    return SamplerRows.build(
        temperature=[request.temperature for request in requests],
        top_k=[request.top_k for request in requests],
        top_p=[request.top_p for request in requests],
        from_support=[request.from_support for request in requests],
        device=device,
    )


def _stop_matrix(requests: Sequence[NativeRequest], device: torch.device) -> Tensor:
    """int64 ``[B, S]``, -1 where a row has fewer stop tokens."""
    widest = max(len(request.stop_token_ids) for request in requests)
    padded = [[*request.stop_token_ids, *[-1] * (widest - len(request.stop_token_ids))] for request in requests]
    return torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(requests), widest)
