"""Recorded turns joined into trainable Samples, by comparing token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles_sc.rollout.merge import join_responses, observation
from miles_sc.rollout.response import append_generated_tokens
from miles_sc.rollout.sample import Sample
from miles_sc.rollout.session.record import RecordedTurn

HISTORIES = ("linear", "branching")


@dataclass(frozen=True)
class Link:
    """A turn in a chain, and how many tokens of the turn before it its prompt left out."""

    turn: RecordedTurn
    dropped: int = 0


def assemble_samples(turns: Sequence[RecordedTurn], history: str = "linear") -> list[Sample]:
    """Every turn is trained exactly once, after exactly the tokens that the engine saw before it.

    A turn continues an earlier one if its prompt begins with that one's prompt and answer, apart from a stop (and white space
    before it) that the chat template left out: the Sample loses those tokens with their rows. What the prompt adds is an
    observation. A turn without tokens, aborted or cut short by its length is continued like any other. The same prompt asked
    once more continues a turn only if that one generated nothing.

    Args:
        turns: in the order in which their calls came in.
        history: ``linear`` wants every turn to continue the one before it and gives one Sample. ``branching`` gives one per
            branch: a turn continues the latest longest match that nothing has continued yet, or starts a Sample of its own
            whose whole prompt is context.

    Returns:
        Samples without text, reward and index; ``truncated`` and ``aborted`` tell how the last turn finished.

    Raises:
        ValueError: a turn of a linear history that does not continue the one before it.
    """
    if history not in HISTORIES:
        raise ValueError(f"history = {history!r}: choose {' or '.join(HISTORIES)}")
    chains = _linear(turns) if history == "linear" else _branching(turns)
    return [_sample(chain) for chain in chains]


def dropped_tokens(earlier: RecordedTurn, later: RecordedTurn) -> int | None:
    """How many of the earlier turn's last tokens the later prompt left out; None where it does not continue that turn."""
    dropped = earlier.prompt_ids.size + len(earlier.generated) - _common(earlier, later)
    if dropped > min(earlier.droppable, len(earlier.generated)):
        return None
    asked_again = dropped and later.prompt_ids.size == earlier.prompt_ids.size
    return None if asked_again else dropped


def _linear(turns: Sequence[RecordedTurn]) -> list[list[Link]]:
    if not turns:
        return []
    chain = [Link(turns[0])]
    for number, (earlier, later) in enumerate(zip(turns, turns[1:], strict=False), start=2):
        dropped = dropped_tokens(earlier, later)
        if dropped is None:
            raise ValueError(_does_not_continue(number, earlier, later))
        chain.append(Link(later, dropped))
    return [chain]


def _branching(turns: Sequence[RecordedTurn]) -> list[list[Link]]:
    chains: list[list[Link]] = []
    for turn in turns:
        matches = [(chain, dropped_tokens(chain[-1].turn, turn)) for chain in chains]
        matches = [(chain, dropped) for chain, dropped in matches if dropped is not None]
        if matches:
            chain, dropped = max(matches, key=lambda match: (_kept(match[0][-1].turn, match[1]), match[0][-1].turn.arrival))
            chain.append(Link(turn, dropped))
        else:
            chains.append([Link(turn)])
    return chains


def _sample(chain: Sequence[Link]) -> Sample:
    prompt, pieces = chain[0].turn.prompt_ids, []
    known = prompt.size
    for link, dropped in zip(chain, [*(later.dropped for later in chain[1:]), 0], strict=True):
        answer = _answer(link.turn)
        answer.strip_last_output_tokens(dropped)
        pieces += [observation(link.turn.prompt_ids[known:].tolist(), like=answer), answer]
        known = link.turn.prompt_ids.size + answer.response_length
    last = chain[-1].turn.generated.finish_reason
    sample = join_responses(prompt.tolist(), pieces)
    sample.turns = sum(link.turn.generated.finish_reason != "abort" for link in chain)
    sample.truncated, sample.aborted = last == "length", last == "abort"
    return sample


def _answer(turn: RecordedTurn) -> Sample:
    """What a turn generated, as a response without a prompt."""
    answer = Sample(weight_versions=turn.generated.weight_versions)
    append_generated_tokens(answer, turn.generated)
    return answer


def _kept(turn: RecordedTurn, dropped: int) -> int:
    return turn.prompt_ids.size + len(turn.generated) - dropped


def _common(earlier: RecordedTurn, later: RecordedTurn) -> int:
    """Length of the longest common prefix of the earlier prompt and answer with the later prompt."""
    start = 0
    for ids in (earlier.prompt_ids, earlier.generated.token_ids):
        there = later.prompt_ids[start : start + ids.size]
        differ = ids[: there.size] != there
        if differ.any():
            return start + int(np.argmax(differ))
        start += there.size
    return start


def _does_not_continue(number: int, earlier: RecordedTurn, later: RecordedTurn) -> str:
    before, position = earlier.token_ids, _common(earlier, later)
    came = f"token {later.prompt_ids[position]}" if position < later.prompt_ids.size else "nothing more"
    where = "prompt" if position < earlier.prompt_ids.size else "answer"
    if np.array_equal(earlier.prompt_ids, later.prompt_ids):
        why = "it asks the same prompt again"
    elif where == "answer":
        why = "the answer was written into the prompt in other tokens (edited, or tokenised anew)"
    else:
        why = "the messages before it were changed"
    return (
        f"turn {number} does not continue turn {number - 1}: at position {position}, within that turn's {where}, it had token "
        f"{before[position]} and the prompt of turn {number} has {came}; {why}. Ask for samples with "
        '{"history": "branching"} to train such turns in Samples of their own'
    )
