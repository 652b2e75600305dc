"""Turns joined into the sample of their conversation by their token ids."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from miles_sc.candidates import Candidates
from miles_sc.rollout.recorded_rows import RecordedRows
from miles_sc.rollout.sample import Sample
from miles_sc.sampling_support import SamplingSupport

_LISTS = ("loss_mask", "rollout_log_probs", "weight_versions")
_FIELDS = (*_LISTS, "rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_sampling_mask")


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
    first, last = turns[0], turns[-1]
    pieces = [_response(first)]
    for earlier, later in pairwise(turns):
        told = later.tokens[len(earlier.tokens) : len(later.tokens) - later.response_length]
        pieces += [observation(told, like=later), _response(later)]
    merged = join_responses(first.tokens[: len(first.tokens) - first.response_length], pieces)
    return replace(
        merged, index=first.index, group_index=first.group_index, reward=last.reward, response=last.response,
        truncated=last.truncated, aborted=last.aborted, turns=sum(turn.turns for turn in turns),
    )  # fmt: skip


def observation(token_ids: Sequence[int], *, like: Sample) -> Sample:
    """What nobody sampled, as a response without a prompt: untrained gap rows in the fields that ``like`` has."""
    piece = Sample(weight_versions=None if like.weight_versions is None else [])
    if like.candidates is not None:
        piece.candidates = Candidates.gap(0, like.candidates.k)
    if like.rollout_sampling_mask is not None:
        piece.rollout_sampling_mask = SamplingSupport.empty()
    piece.append_observation(token_ids)
    return piece


def join_responses(prompt: Sequence[int], pieces: Sequence[Sample]) -> Sample:
    """A sample whose response is that of the pieces, one after the other; each row is copied once, however many they are.

    Args:
        pieces: without prompts; a field is there in all of them or in none.
    """
    sample = Sample(tokens=list(prompt), response_length=sum(piece.response_length for piece in pieces))
    sample.tokens += [token for piece in pieces for token in piece.tokens]
    for name in _LISTS:
        if getattr(pieces[0], name) is not None:
            setattr(sample, name, [value for piece in pieces for value in getattr(piece, name)])
    if pieces[0].candidates is not None:
        RecordedRows.concatenate([RecordedRows.of(piece) for piece in pieces]).put(sample)
    return sample


def _response(turn: Sample) -> Sample:
    """A turn without its prompt."""
    return replace(turn, tokens=turn.tokens[len(turn.tokens) - turn.response_length :])


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
    for name in ("loss_mask", "rollout_log_probs"):
        if getattr(later, name) is None:
            raise ValueError(f"turn {number} lacks {name}: fill it for every response token before turns are merged")
    for name in _FIELDS:
        if (getattr(earlier, name) is None) != (getattr(later, name) is None):
            lacking = number if getattr(later, name) is None else number - 1
            raise ValueError(f"turn {lacking} lacks {name} and its neighbour has it: all turns need the same fields")
    if earlier.candidates is not None and earlier.candidates.k != later.candidates.k:
        raise ValueError(
            f"turn {number} has {later.candidates.k} candidate slots and turn {number - 1} {earlier.candidates.k}: record both "
            "with the same K"
        )
