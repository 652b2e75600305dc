"""Which groups a rollout samples and which it keeps: over-sampling, early stop, and responses continued in a later rollout."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from miles_sc.rollout.engines import Engine
from miles_sc.rollout.generate import all_or_none
from miles_sc.rollout.sample import Sample
from miles_sc.trainer.tasks import Problem

T = TypeVar("T")

_NOTHING = {
    "output_ids": [],
    "meta_info": {"output_token_logprobs": [], "finish_reason": {"type": "abort"}, "completion_tokens": 0},
}


@dataclass
class Group:
    """One problem and its samples.

    Attributes:
        number: the problem's, counted over the run.
    """

    number: int
    problem: Problem
    samples: list[Sample]

    @property
    def complete(self) -> bool:
        """Whether every response has ended by itself."""
        return all(_has_ended(sample) for sample in self.samples)


async def collect(
    engine: Engine, groups: list[Group], wanted: int, respond: Callable[[Engine, Group, Sample], Awaitable[None]]
) -> tuple[list[Group], list[Group]]:
    """Samples ``groups`` together until ``wanted`` of them are complete, and stops the others.

    Args:
        respond: fills one sample from the engine it is given; called again on one that an abort cut short, it continues it.

    Returns:
        ``wanted`` complete groups, those that finished first but in the order of ``groups``; and the rest, complete or not.

    Raises:
        ValueError: too few are complete, since somebody else stopped responses.
    """
    stoppable, finished = _Stoppable(engine), []

    async def fill(group: Group) -> None:
        await all_or_none(respond(stoppable, group, sample) for sample in group.samples if not _has_ended(sample))
        if group.complete:
            finished.append(group.number)
            if len(finished) == wanted:
                await stoppable.stop()

    await all_or_none(fill(group) for group in groups)
    if len(finished) < wanted:
        raise ValueError(
            f"{len(finished)} of {wanted} groups are complete: the engine aborted responses that nobody here stopped; does "
            "somebody else use it? give every run servers of its own"
        )
    kept = set(finished[:wanted])
    return [group for group in groups if group.number in kept], [group for group in groups if group.number not in kept]


def _has_ended(sample: Sample) -> bool:
    return (sample.turns > 0 or sample.truncated) and not sample.aborted


class _Stoppable:
    """An engine that, once stopped, answers what was under way and what still comes with an abort."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._stopped = engine, False

    async def generate(self, request: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
        if self._stopped:
            return read(_NOTHING)
        return await self._engine.generate(request, read)

    async def stop(self) -> None:
        self._stopped = True
        await self._engine.abort()
