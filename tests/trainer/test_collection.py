"""Over-sampling: enough complete groups are kept, the rest is stopped and can be continued."""

import asyncio

import pytest

from miles_sc.rollout.generate import GenerationSettings, generate_conversation, generate_response
from miles_sc.rollout.sample import Sample
from miles_sc.trainer.collection import Group, collect
from miles_sc.trainer.tasks import Problem
from tests.rollout.test_generate import CONFIGS, decode
from tests.samples import PROMPT, VOCAB, answer

SETTINGS = GenerationSettings(CONFIGS["selected"], 20, VOCAB, decode)


class SlowEngine:
    """Takes as many ticks for an answer as the prompt's last id says; an abort ends it with one token. ``slots`` at once."""

    def __init__(self, slots=100):
        self.slots, self.stopping, self.calls = asyncio.Semaphore(slots), False, 0

    async def generate(self, request, read):
        self.calls += 1
        async with self.slots:
            for _ in range(request["input_ids"][len(PROMPT)]):
                if self.stopping:
                    break
                await asyncio.sleep(0.001)
        self.calls -= 1
        meta = answer(1 if self.stopping else 2) | {"finish_reason": {"type": "abort" if self.stopping else "stop"}}
        return read({"meta_info": meta})

    async def abort(self):
        self.stopping = True
        while self.calls:
            await asyncio.sleep(0.001)
        self.stopping = False


def groups_of(*ticks, size=2):
    return [
        Group(number, Problem(number, "", "", {}), [Sample(tokens=[*PROMPT, count], index=number) for _ in range(size)])
        for number, count in enumerate(ticks)
    ]


async def respond(engine, group, sample):
    await generate_response(engine, sample, SETTINGS, sampling_seed=0)


def numbers(groups):
    return [group.number for group in groups]


def test_everything_is_kept_where_nothing_is_sampled_in_excess():
    complete, rest = asyncio.run(collect(SlowEngine(), groups_of(5, 1, 3), 3, respond))
    assert numbers(complete) == [0, 1, 2] and rest == [] and all(group.complete for group in complete)


def test_the_first_to_finish_are_kept_in_order_and_the_others_stopped_with_what_they_have():
    complete, rest = asyncio.run(collect(SlowEngine(), groups_of(3, 2000, 1, 2000), 2, respond))
    assert numbers(complete) == [0, 2] and numbers(rest) == [1, 3]
    for group in rest:
        assert not group.complete
        for sample in group.samples:
            assert sample.aborted and sample.response_length == 1


def test_what_was_stopped_is_continued_and_keeps_its_rows():
    async def two_rollouts():
        _, rest = await collect(SlowEngine(), groups_of(1, 2000), 1, respond)
        before = [list(sample.tokens) for sample in rest[0].samples]
        for sample in rest[0].samples:
            sample.tokens[len(PROMPT)] = 1  # quick from here on
        return before, await collect(SlowEngine(), [*rest, *groups_of(3000)], 1, respond)

    before, (complete, rest) = asyncio.run(two_rollouts())
    assert numbers(complete) == [1] and numbers(rest) == [0]
    for tokens, sample in zip(before, complete[0].samples, strict=True):
        assert sample.response_length == 3 and sample.tokens[len(PROMPT) + 1 : -2] == tokens[len(PROMPT) + 1 :]


def test_a_call_that_waited_for_a_connection_is_stopped_too():
    engine = SlowEngine(slots=2)
    complete, rest = asyncio.run(asyncio.wait_for(collect(engine, groups_of(1, 2000, 2000, 2000), 1, respond), 10))
    assert numbers(complete) == [0] and numbers(rest) == [1, 2, 3] and engine.calls == 0
    assert all(sample.aborted for group in rest for sample in group.samples)


def test_a_conversation_stops_at_its_next_turn():
    class Told:
        async def observe(self, sample, text):
            await asyncio.sleep(0.05)  # a slow tool: no call is under way while it works
            return [7]

    async def converse(engine, group, sample):
        environment = Told()
        await generate_conversation(
            engine, sample, SETTINGS, environment, max_turns=1 if group.number == 0 else 5, sampling_seed=0
        )

    complete, rest = asyncio.run(collect(SlowEngine(), groups_of(20, 1), 1, converse))
    assert numbers(complete) == [0] and all(sample.aborted and sample.turns == 1 for sample in rest[0].samples)
    assert all(sample.loss_mask == [1, 1, 0] for sample in rest[0].samples)


def test_a_group_is_complete_only_with_all_of_its_samples():
    groups = groups_of(1, 1)
    groups[1].samples[1].tokens[len(PROMPT)] = 2000
    complete, rest = asyncio.run(collect(SlowEngine(), groups, 1, respond))
    assert numbers(complete) == [0] and [sample.aborted for sample in rest[0].samples] == [False, True]


def test_a_failure_ends_the_collection():
    async def fail(engine, group, sample):
        if group.number == 1:
            raise ValueError("no")
        await respond(engine, group, sample)

    with pytest.raises(ValueError, match="no"):
        asyncio.run(collect(SlowEngine(), groups_of(1, 1, 2000), 3, fail))


def test_responses_that_somebody_else_aborts_are_not_a_smaller_rollout():
    async def abort_from_outside(engine, group, sample):
        if group.number == 1:
            engine = Outsider()
        await respond(engine, group, sample)

    class Outsider:
        async def generate(self, request, read):
            return read({"meta_info": answer(1) | {"finish_reason": {"type": "abort"}}})

    with pytest.raises(ValueError, match="1 of 2 groups are complete: the engine aborted responses that nobody here stopped"):
        asyncio.run(collect(SlowEngine(), groups_of(1, 1), 2, abort_from_outside))
