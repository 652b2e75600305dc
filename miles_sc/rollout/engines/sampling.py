"""The sampling distribution of a batch of rows and a draw from it: what is reported is what is drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplerRows:
    """Sampling settings of ``B`` rows.

    temperature: float32 ``[B, 1]``, positive. top_k: int64 ``[B, 1]``, the vocabulary for "no filter".
    top_p: float64 ``[B, 1]`` in (0, 1]. from_support: bool ``[B]``, rows drawn from the filtered support.
    any_support, all_support: what holds of the rows that decoding began with, as host values: no step synchronises.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    from_support: Tensor
    any_support: bool
    all_support: bool

    @classmethod
    def build(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        from_support: Sequence[bool],
        device: torch.device,
    ) -> SamplerRows:
        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device)[:, None],
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device)[:, None],
            top_p=torch.tensor(top_p, dtype=torch.float64, device=device)[:, None],
            from_support=torch.tensor(from_support, dtype=torch.bool, device=device),
            any_support=any(from_support),
            all_support=all(from_support),
        )

    def select(self, indices: Tensor) -> SamplerRows:
        """The rows at ``indices`` (int64), whose draws keep the fields that they began with."""
        return SamplerRows(
            self.temperature[indices],
            self.top_k[indices],
            self.top_p[indices],
            self.from_support[indices],
            self.any_support,
            self.all_support,
        )


@dataclass(frozen=True)
class Draw:
    """One token a row, and the distribution it came from.

    token_ids: int64 ``[B]``. log_probs: float32 ``[B]``, over the full vocabulary at the row's temperature.
    head_token_ids: int64 ``[B, H]``, most probable first, ties by ascending id. head_log_probs: float32 ``[B, H]``,
    likewise over the full vocabulary. Where any row is drawn from its support: support_log_probs float32 ``[B, H]``
    (-inf past the support, which is a prefix of the head), support_lengths int64 ``[B]`` and support_log_probs_of_token
    float32 ``[B]``, all meaningless on the other rows; else None.
    """

    token_ids: Tensor
    log_probs: Tensor
    head_token_ids: Tensor
    head_log_probs: Tensor
    support_log_probs: Tensor | None = None
    support_lengths: Tensor | None = None
    support_log_probs_of_token: Tensor | None = None


def draw_tokens(logits: Tensor, rows: SamplerRows, uniforms: Tensor, head_width: int) -> Draw:
    """Draws one token a row.

    Args:
        logits: ``[B, V]`` over the true vocabulary, any floating dtype; taken to float32 first.
        rows: settings of the ``B`` rows.
        uniforms: float64 ``[B]`` in [0, 1), one a row; the only randomness.
        head_width: ``H``, how many of the most probable tokens are reported. At least the ``top_k`` of every row that
            is drawn from its support.

    Raises:
        ValueError: a row's logits hold NaN or +inf, or nothing but -inf.
    """
    scaled = logits.float() / rows.temperature
    log_normalizer = torch.logsumexp(scaled, dim=-1, keepdim=True)
    _check_finite(log_normalizer)
    head_scaled, head_token_ids = ordered_top(scaled, head_width)
    head_log_probs = head_scaled - log_normalizer

    if not rows.any_support:
        log_probs = scaled - log_normalizer
        token_ids = inverse_cdf(log_probs, uniforms)
        return Draw(token_ids, _pick(log_probs, token_ids), head_token_ids, head_log_probs)

    support_log_probs, support_lengths = filtered_log_probs(head_scaled, rows.top_k, rows.top_p)
    column = inverse_cdf(support_log_probs, uniforms)
    token_ids = _pick(head_token_ids, column)
    if not rows.all_support:
        token_ids = torch.where(rows.from_support, token_ids, inverse_cdf(scaled - log_normalizer, uniforms))
    return Draw(
        token_ids,
        _pick(scaled, token_ids) - log_normalizer.squeeze(-1),
        head_token_ids,
        head_log_probs,
        support_log_probs,
        support_lengths,
        _pick(support_log_probs, column),
    )


def ordered_top(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest of each row in descending order, ties by ascending column, so exactly ``width`` and the
    same whatever the width and the batch: float32 ``[B, V]`` -> (float32 ``[B, width]``, int64 ``[B, width]``).
    """
    if width == 0:
        return values[:, :0], values.new_zeros((values.shape[0], 0), dtype=torch.int64)
    bits = values.contiguous().view(torch.int32)
    # The bits of a float order as integers once the magnitude bits of negatives are flipped; the column fills the low
    # word.
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = (ascending << 32).sub_(torch.arange(values.shape[-1], device=values.device))
    columns = keys.topk(width, dim=-1).values.neg_().bitwise_and_(0xFFFFFFFF)
    return values.gather(-1, columns), columns


def filtered_log_probs(head_scaled: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Top-k, then top-p on the renormalised top-k set, renormalised again.

    Args:
        head_scaled: float32 ``[B, H]``, logits over temperature in descending order.
        top_k: int64 ``[B, 1]``; exactly ``min(top_k, H)`` stay, ties notwithstanding.
        top_p: float64 ``[B, 1]``; the shortest prefix whose mass reaches it stays, at least one token.

    Returns:
        float32 ``[B, H]`` log-probs, -inf past the support, formed in float64; int64 ``[B]`` support lengths.
    """
    inside = torch.arange(head_scaled.shape[-1], device=head_scaled.device) < top_k
    scaled = head_scaled.double().masked_fill(~inside, -torch.inf)
    probs = torch.softmax(scaled, dim=-1)
    # top_p = 1 is no filter: a rounded cumulative mass must not cut the last tokens off.
    inside &= (probs.cumsum(-1) - probs < top_p) | (top_p >= 1.0)
    scaled = scaled.masked_fill(~inside, -torch.inf)
    return (scaled - torch.logsumexp(scaled, dim=-1, keepdim=True)).float(), inside.sum(-1)


def inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Columns drawn from float32 log-probs ``[B, N]`` by inverse CDF in float64: int64 ``[B]``, never one of mass 0."""
    cumulative = log_probs.double().exp_().cumsum_(-1)
    # u < 1, so u * total < total: the first column past it exists, and the mass there is positive.
    target = (uniforms * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def _pick(values: Tensor, columns: Tensor) -> Tensor:
    return values.gather(-1, columns[:, None]).squeeze(-1)


def _check_finite(log_normalizer: Tensor) -> None:
    finite = torch.isfinite(log_normalizer)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0, 0])
        raise ValueError(
            f"the model's logits are not finite (log-normalizer {log_normalizer[row].item()} in batch row {row}); "
            "check the weights that were loaded last, or raise the temperature"
        )
