"""Samples of single turns, joined into the sample of their conversation by their token ids."""

import copy
from collections.abc import Sequence
from itertools import pairwise

from miles_sc.candidates import Candidates
from miles_sc.rollout.sample import Sample
from miles_sc.sampling_support import SamplingSupport

_COLUMNS = ("rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_log_probs", "loss_mask", "weight_versions")


def merge_turns(turns: Sequence[Sample]) -> Sample:
    """One sample of a conversation whose turns a producer has recorded one by one.

    Each turn's prompt must begin with the whole turn before it, token id by token id; what it adds is an observation. Nothing is
    decoded or tokenised anew. A template that leaves out a turn's last tokens needs ``strip_last_output_tokens`` on that turn
    first.

    Returns:
        A new sample: the first turn's prompt, the response rows of all, and how the last one ended (reward, text, truncated).

    Raises:
        ValueError: a turn that does not continue the one before it, a field that one turn has and another lacks, another K; the
            turn's number, the position and the remedy are named.
    """
    if not turns:
        raise ValueError("no turns to merge: the conversation recorded nothing")
    for turn in turns:
        turn.check_rows()
    for number, (earlier, later) in enumerate(pairwise(turns), start=2):
        _check_continues(number, earlier, later)
    merged = copy.copy(turns[0])
    for turn in turns[1:]:
        prompt = turn.tokens[: len(turn.tokens) - turn.response_length]
        if added := prompt[len(merged.tokens) :]:
            merged.append_observation(added)
        _append_rows(merged, turn)
    last = turns[-1]
    merged.reward, merged.response, merged.truncated, merged.aborted = last.reward, last.response, last.truncated, last.aborted
    merged.turns = sum(turn.turns for turn in turns)
    return merged


def _check_continues(number: int, earlier: Sample, later: Sample) -> None:
    prompt = later.tokens[: len(later.tokens) - later.response_length]
    if prompt[: len(earlier.tokens)] != list(earlier.tokens):
        pairs = zip(earlier.tokens, prompt, strict=False)
        position = next((at for at, (had, has) in enumerate(pairs) if had != has), len(prompt))
        has = f"token {prompt[position]}" if position < len(prompt) else "nothing more"
        raise ValueError(
            f"turn {number} does not continue turn {number - 1}: at position {position} that one has token "
            f"{earlier.tokens[position]} and the prompt of turn {number} has {has}; keep them as samples of their own, or strip "
            "what the template leaves out"
        )
    for name in (*_COLUMNS, "rollout_sampling_mask"):
        if (getattr(earlier, name) is None) != (getattr(later, name) is None):
            lacking = number if getattr(later, name) is None else number - 1
            raise ValueError(
                f"turn {lacking} lacks {name} and its neighbour has it: every turn of a conversation needs the same fields"
            )


def _append_rows(merged: Sample, turn: Sample) -> None:
    if turn.candidates is not None:
        merged.candidates = Candidates.concatenate([merged.candidates, turn.candidates])
    if turn.rollout_sampling_mask is not None:
        merged.rollout_sampling_mask = SamplingSupport.concatenate([merged.rollout_sampling_mask, turn.rollout_sampling_mask])
    for name in ("rollout_log_probs", "loss_mask", "weight_versions"):
        if getattr(turn, name) is not None:
            setattr(merged, name, [*getattr(merged, name), *getattr(turn, name)])
    merged.tokens = list(turn.tokens)
    merged.response_length += turn.response_length
