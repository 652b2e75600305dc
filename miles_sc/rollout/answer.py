"""One call's answer, read and validated: sampled tokens with their candidates and support (CONTRACT 6)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_sc.candidates import AGREEMENT, LOG_PROB_SLACK, MINUS_INFINITY, Candidates
from miles_sc.rollout.answer_fields import SAMPLED, SUPPORT_IDS, sampled_tokens, support_candidates, top_candidates
from miles_sc.sampling_support import SamplingSupport


@dataclass(frozen=True)
class GeneratedTokens:
    """What one call generated, validated: n tokens with their rows.

    Attributes:
        token_ids: int64 ``[n]``.
        log_probs: float64 ``[n]``, log q of the sampled token; over the support where sampling was filtered.
        candidates: ``[n, K]``; None where none are recorded (K = 0).
        support: under filtered sampling.
        weight_versions: n names of the weights that sampled each token, "" where the engine names none.
        finish_reason: ``stop``, ``length``, ``abort`` or what else the engine says; "" if it says nothing.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    candidates: Candidates | None
    support: SamplingSupport | None
    weight_versions: list[str]
    finish_reason: str

    def __len__(self) -> int:
        return self.token_ids.size


def read_generated_tokens(
    meta_info: Mapping[str, Any], *, k: int, mode: str = "selected", vocab_size: int | None = None
) -> GeneratedTokens:
    """Parses and validates one answer's ``meta_info``, native or a chat choice's.

    Args:
        k: candidates asked for, the width of the arrays; 0 reads the sampled tokens alone.
        mode: ``selected`` (top k of the whole vocabulary) or ``support`` (everything filtered sampling could draw).
        vocab_size: the producer's; bounds the ids, and the rows where it is smaller than k.

    Raises:
        ValueError: anything missing, short, long, misaligned or not a distribution.
    """
    if mode not in ("selected", "support"):
        raise ValueError(f"mode = {mode!r}: choose selected or support")
    if k < 0:
        raise ValueError(f"k = {k}: give a number of candidates, or 0 for none")
    token_ids, log_probs = sampled_tokens(meta_info)
    rows, candidates, support = token_ids.size, None, None
    if k and rows == 0:
        # nothing was generated: the fields may be absent, or hold a stray row (SGLang 0.5.23 for max_new_tokens=0)
        candidates = Candidates.gap(0, k)
        support = SamplingSupport.empty() if mode == "support" else None
    elif k and mode == "support":
        candidates, support = support_candidates(meta_info, rows, k)
        log_probs = _log_probs_within_support(candidates, token_ids)
    elif k:
        candidates = _selected_candidates(meta_info, rows, k, vocab_size)
    _check_sampled(token_ids, log_probs, vocab_size)
    if support is not None:  # in which each token was found, and from which it has its log-prob
        candidates.validate(vocab_size=vocab_size, complete=True)
    elif candidates is not None:
        candidates.validate(vocab_size=vocab_size, sampled_token_ids=token_ids, sampled_log_probs=log_probs)
    finish_reason = meta_info.get("finish_reason") or ""
    if isinstance(finish_reason, Mapping):
        finish_reason = finish_reason.get("type") or ""
    versions = _weight_versions(meta_info, rows)
    return GeneratedTokens(token_ids, log_probs, candidates, support, versions, str(finish_reason))


def check_likeliest(generated: GeneratedTokens) -> None:
    """Refuses rows whose candidates cannot be the likeliest tokens of the distribution that a token was drawn from.

    An engine's are, so a sampled token outside of them is at most as likely as the least of them; a shifted row shows here even
    if no sampled token is among its candidates. Candidates that a producer chooses otherwise need not be.

    Raises:
        ValueError: the first such row, both log-probs and the remedy.
    """
    candidates = generated.candidates
    if candidates is None or generated.support is not None or not len(generated):
        return
    least = candidates.log_probs.min(axis=1)  # -inf where slots are unused, since the vocabulary is smaller: all are candidates
    unlike = (generated.log_probs > least + AGREEMENT) & np.isfinite(least)
    if not unlike.any():
        return
    unlike &= ~candidates.holding(generated.token_ids).any(axis=1)
    if unlike.any():
        row = int(np.argmax(unlike))
        raise ValueError(
            f"{SAMPLED}, row {row}: token {generated.token_ids[row]} has log-prob {generated.log_probs[row]:.6g} and is not "
            f"among the candidates, the least of which has {least[row]:.6g}: are rows shifted, or are these not the likeliest?"
        )


def meta_info_of(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a native answer says beside its text.

    Raises:
        ValueError: there is none; what came instead is quoted.
    """
    meta_info = answer.get("meta_info")
    if not isinstance(meta_info, Mapping):
        raise ValueError(f"the answer holds no meta_info: {str(dict(answer))[:200]}; is this the engine's /generate?")
    return meta_info


def sampling_versions(meta_info: Mapping[str, Any]) -> list[str]:
    """The weights that an answer's tokens were sampled by, in order; "" where the engine names none.

    Raises:
        ValueError: ``weight_versions`` is no list of spans.
    """
    spans = _version_spans(meta_info)
    return [meta_info.get("weight_version") or ""] if spans is None else [version for version, _, _ in spans]


def _weight_versions(meta_info: Mapping[str, Any], rows: int) -> list[str]:
    """The weights that sampled each of the call's tokens; they may have changed on the way."""
    spans = _version_spans(meta_info)
    if spans is None:
        return [meta_info.get("weight_version") or ""] * rows
    versions: list[str] = []
    for version, start, end in spans:
        if start != len(versions) or end < start:
            break
        versions += [version] * (end - start)
    if len(versions) != rows:
        raise ValueError(
            f"weight_versions = {meta_info['weight_versions']} for {rows} generated tokens: every token was sampled by one "
            "version"
        )
    return versions


def _version_spans(meta_info: Mapping[str, Any]) -> list[tuple[str, int, int]] | None:
    spans = meta_info.get("weight_versions")
    if spans is None:
        return None
    try:
        read = [(span["version"], span["start"], span["end"]) for span in spans]
    except (TypeError, LookupError) as error:
        raise ValueError(f"weight_versions = {spans!r}: wanted a list of spans with version, start and end") from error
    if not all(isinstance(version, str) and type(start) is type(end) is int for version, start, end in read):
        raise ValueError(f"weight_versions = {spans!r}: wanted spans with a name and two whole numbers")
    return read


def _check_sampled(token_ids: np.ndarray, log_probs: np.ndarray, vocab_size: int | None) -> None:
    highest_id = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    if token_ids.size == 0 or (
        MINUS_INFINITY < log_probs.min()
        and log_probs.max() <= LOG_PROB_SLACK
        and token_ids.min() >= 0
        and token_ids.max() <= highest_id
    ):
        return
    for broken, what in (
        (~np.isfinite(log_probs), "is not finite"),
        (log_probs <= MINUS_INFINITY, "stands for -inf, and what was sampled had a probability"),
        (log_probs > LOG_PROB_SLACK, "is above 0, so it is no log-prob"),
    ):
        if broken.any():
            row = int(np.argmax(broken))
            raise ValueError(f"{SAMPLED}, row {row}: log-prob {log_probs[row]} of token {token_ids[row]} {what}")
    row = int(np.argmax((token_ids < 0) | (token_ids > highest_id)))
    raise ValueError(f"{SAMPLED}, row {row}: token {token_ids[row]} is outside the vocabulary of {vocab_size}")


def _selected_candidates(meta_info: Mapping[str, Any], rows: int, k: int, vocab_size: int | None) -> Candidates:
    width = k if vocab_size is None else min(k, vocab_size)
    top = top_candidates(meta_info, rows, width)
    if width == k:
        return top
    padded = Candidates.gap(rows, k)
    padded.token_ids[:, :width], padded.log_probs[:, :width] = top.token_ids, top.log_probs
    return padded


def _log_probs_within_support(candidates: Candidates, token_ids: np.ndarray) -> np.ndarray:
    """log q after filtering, float64 ``[n]``; a token that is not once in its support is an error."""
    holding = candidates.holding(token_ids)
    slots, rows = holding.argmax(axis=1), np.arange(len(token_ids))
    if not holding[rows, slots].all() or np.count_nonzero(holding) != len(rows):
        times = holding.sum(axis=1)
        row = int(np.argmax(times != 1))
        raise ValueError(
            f"{SUPPORT_IDS}, row {row}: the sampled token {token_ids[row]} stands {times[row]} times in the support it was drawn "
            "from, and must stand once: are rows shifted?"
        )
    return candidates.log_probs[rows, slots].astype(np.float64)
