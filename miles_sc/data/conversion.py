"""Samples -> train data: validated, with group-relative advantages, as lists of numpy arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles_sc.candidates import LOG_PROB_SLACK, MINUS_INFINITY, Candidates
from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.recorded_rows import RecordedRows
from miles_sc.rollout.sample import Sample
from miles_sc.sampling_support import SamplingSupport

TrainData = dict[str, list[Any]]


def samples_to_train_data(
    samples: Sequence[Sample],
    config: ScoreCenteringConfig,
    *,
    vocab_size: int | None = None,
    normalize_rewards: bool = True,
    normalize_std: bool = True,
) -> TrainData:
    """Converts a rollout.

    Args:
        samples: with rewards; those of one prompt share ``group_index``.
        config: the run's; with K > 0 every sample must bring candidates, whoever produced it.
        normalize_rewards: subtract each group's mean (GRPO).
        normalize_std: also divide by its standard deviation; ``--disable-grpo-std-normalization`` turns it off.

    Returns:
        Per key one entry a sample: ``tokens`` int32, ``response_lengths``, ``loss_masks`` uint8 ``[R]``, ``raw_reward``,
        ``rewards`` (the advantage of each of its tokens), ``truncated``, ``sample_indices``, ``rollout_log_probs`` float32
        ``[R]``; with K > 0 ``rollout_topk_log_probs`` and ``rollout_topk_token_ids``, or in the ids' place
        ``rollout_topk_lengths`` where the recorded support says the same (per sample; the other entry is None);
        under replay ``rollout_sampling_mask_ids`` and ``rollout_sampling_mask_offsets``.

    Raises:
        ValueError: a field that is absent, misaligned or holds a bad number; sample, row and remedy are named.
    """
    if not samples:
        raise ValueError("no samples to convert: the rollout produced nothing")
    for sample in samples:
        _check_sample(sample, config, vocab_size)
    rewards = group_relative_rewards(samples, normalize_rewards=normalize_rewards, normalize_std=normalize_std)
    data: TrainData = {
        "tokens": [np.asarray(sample.tokens, np.int32) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": [np.asarray(sample.loss_mask, np.uint8) for sample in samples],
        "raw_reward": [float(sample.reward) for sample in samples],
        "rewards": rewards.tolist(),
        "truncated": [int(sample.truncated) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_log_probs": [np.asarray(sample.rollout_log_probs, np.float32) for sample in samples],
    }
    if config.top_logprobs_num:
        data.update(candidate_columns(samples, config))
    return data


def group_relative_rewards(samples: Sequence[Sample], *, normalize_rewards: bool, normalize_std: bool) -> np.ndarray:
    """GRPO advantages, float32 ``[samples]``: reward minus its group's mean, over its standard deviation if asked for."""
    rewards = np.array([sample.reward for sample in samples], np.float64)
    if not np.isfinite(rewards).all():
        broken = int(np.argmax(~np.isfinite(rewards)))
        raise ValueError(f"sample {samples[broken].index}: reward {rewards[broken]} is not finite; look at the reward function")
    if not normalize_rewards:
        return rewards.astype(np.float32)
    _, groups = np.unique([sample.group_index for sample in samples], return_inverse=True)
    sizes = np.bincount(groups)
    centered = rewards - (np.bincount(groups, rewards) / sizes)[groups]
    # equal rewards leave rounding behind; an advantage of exactly 0 says "not trained"
    centered[np.abs(centered) < 1e-9] = 0.0
    if normalize_std:
        # unbiased, as torch's std; a group of one has nothing to compare with and stays 0
        variance = np.bincount(groups, centered**2) / np.maximum(sizes - 1, 1)
        centered /= np.sqrt(variance)[groups] + 1e-6
    return centered.astype(np.float32)


def _check_sample(sample: Sample, config: ScoreCenteringConfig, vocab_size: int | None) -> None:
    where = f"sample {sample.index}"
    wanted = ["loss_mask", "rollout_log_probs", "reward"]
    if config.top_logprobs_num:
        wanted += ["rollout_topk_token_ids", "rollout_topk_log_probs"]
        if config.mode == "support":
            wanted.append("rollout_sampling_mask")
    for name in wanted:
        if getattr(sample, name) is None:
            raise ValueError(f"{where}: {name} is missing; its producer must fill it from the call that generated the response")
    sample.check_rows()
    _check_tokens(sample, vocab_size, where)
    check_recorded_rows(sample, config, vocab_size=vocab_size, where=where)


def check_recorded_rows(sample: Any, config: ScoreCenteringConfig, *, vocab_size: int | None, where: str) -> None:
    """What a sample recorded, row by row, against what the loss will rest on.

    Args:
        sample: ours or a host's, with ``loss_mask``, ``rollout_log_probs`` and with K > 0 its candidates, aligned.
        where: what to call it in an error.

    Raises:
        ValueError: the row, its value and the remedy.
    """
    trained = _trained_rows(sample.loss_mask, where)
    log_probs = np.asarray(sample.rollout_log_probs, np.float64)
    broken = trained & ~(np.isfinite(log_probs) & (log_probs > MINUS_INFINITY) & (log_probs <= LOG_PROB_SLACK))
    if broken.any():
        row = int(np.argmax(broken))
        raise ValueError(
            f"{where}: rollout_log_probs[{row}] = {log_probs[row]} on a trained token; the producer must record finite log-probs "
            "of at most 0"
        )
    if not config.top_logprobs_num:
        return
    rows = RecordedRows.of(sample, where=where)
    candidates = rows.candidates
    if candidates.k != config.top_logprobs_num:
        raise ValueError(
            f"{where}: {candidates.k} candidate slots and --rollout-top-logprobs-num {config.top_logprobs_num}: they must agree"
        )
    candidates.validate(
        vocab_size=vocab_size,
        sampled_token_ids=np.asarray(sample.tokens[len(sample.tokens) - sample.response_length :], np.int64),
        sampled_log_probs=log_probs,
        complete=config.mode == "support",
        trained=trained,
        where=where,
    )
    if config.mode == "support" and _compact_lengths(candidates, rows.support) is None:
        _check_support(rows.support, candidates, where)


def _check_tokens(sample: Sample, vocab_size: int | None, where: str) -> None:
    if sample.response_length == len(sample.tokens):
        raise ValueError(f"{where}: no prompt token; a response's first token is scored by the logits of the token before it")
    tokens = np.asarray(sample.tokens, np.int64)
    outside = (tokens < 0) | (tokens >= (np.inf if vocab_size is None else vocab_size))
    if outside.any():
        place = int(np.argmax(outside))
        raise ValueError(f"{where}: token {tokens[place]} at position {place} is outside the vocabulary of {vocab_size}")


def _trained_rows(loss_mask: Sequence[int], where: str) -> np.ndarray:
    mask = np.asarray(loss_mask)
    broken = (mask != 0) & (mask != 1)
    if broken.any():
        row = int(np.argmax(broken))
        raise ValueError(f"{where}: loss_mask[{row}] = {mask[row]}; a token is trained (1) or not (0)")
    return mask != 0


def _check_support(support: SamplingSupport, candidates: Candidates, where: str) -> None:
    """A row's candidates are its support, in any order; a gap row may have any."""
    filled = (candidates.token_ids >= 0).any(axis=1)
    width = max(candidates.k, int(support.lengths.max(initial=0)))
    expected, found = support.padded(width), np.full((len(candidates), width), -1, np.int32)
    found[:, : candidates.k] = candidates.token_ids
    differs = filled & (np.sort(expected, axis=1) != np.sort(found, axis=1)).any(axis=1)
    if differs.any():
        row = int(np.argmax(differs))
        raise ValueError(
            f"{where}, row {row}: the candidates are not the recorded sampling support; the whole support must be recorded"
        )


def candidate_columns(samples: Sequence[Any], config: ScoreCenteringConfig) -> TrainData:
    """The recorded rows of samples, ours or a host's, as train data; :func:`samples_to_train_data` names the keys."""
    columns: TrainData = {
        "rollout_topk_token_ids": [sample.rollout_topk_token_ids for sample in samples],
        "rollout_topk_log_probs": [sample.rollout_topk_log_probs for sample in samples],
    }
    if config.mode == "support":
        columns["rollout_sampling_mask_ids"] = [sample.rollout_sampling_mask.ids for sample in samples]
        columns["rollout_sampling_mask_offsets"] = [sample.rollout_sampling_mask.offsets for sample in samples]
        columns["rollout_topk_lengths"] = [
            _compact_lengths(RecordedRows.of(sample).candidates, sample.rollout_sampling_mask) for sample in samples
        ]
        columns["rollout_topk_token_ids"] = [
            ids if lengths is None else None
            for ids, lengths in zip(columns["rollout_topk_token_ids"], columns["rollout_topk_lengths"], strict=True)
        ]
    return columns


def _compact_lengths(candidates: Candidates, support: SamplingSupport) -> np.ndarray | None:
    """Candidates per row, int32 ``[R]``, if the support repeats the ids in order (a gap counts 0); else None."""
    used = candidates.token_ids >= 0
    counts = used.sum(axis=1)
    expected = support.padded(max(candidates.k, int(support.lengths.max(initial=0))))[:, : candidates.k]
    same = (expected == candidates.token_ids).all(axis=1) & (counts == support.lengths)
    return counts.astype(np.int32) if (same | (counts == 0)).all() else None
