"""Calls that are made together are decoded together, whoever makes them."""

import asyncio

import pytest

from miles_sc.rollout.engines.in_process import InProcessEngine


class Recorder:
    """Answers with the prompt, and remembers which requests came together."""

    def __init__(self, failure=None):
        self.batches, self.failure, self.weights = [], failure, []

    def generate(self, requests):
        self.batches.append([request["input_ids"] for request in requests])
        if self.failure:
            raise self.failure
        return [{"output_ids": request["input_ids"]} for request in requests]

    def update_weights(self, state, version):
        self.weights.append((state, version))


def ask(engine, ids):
    return engine.generate({"input_ids": ids}, lambda answer: answer["output_ids"])


def test_a_batch_is_what_was_asked_together():
    sampler = Recorder()

    async def two_turns(engine, start):
        first = await ask(engine, [start])
        return await ask(engine, [*first, start])

    async def run():
        engine = InProcessEngine(sampler)
        return await asyncio.gather(*(two_turns(engine, start) for start in (1, 2, 3)))

    assert asyncio.run(run()) == [[1, 1], [2, 2], [3, 3]]
    assert sampler.batches == [[[1], [2], [3]], [[1, 1], [2, 2], [3, 3]]]


def test_what_fails_reaches_everyone_who_asked():
    async def run():
        engine = InProcessEngine(Recorder(ValueError("no")))
        return await asyncio.gather(ask(engine, [1]), ask(engine, [2]), return_exceptions=True)

    assert [str(error) for error in asyncio.run(run())] == ["no", "no"]


def test_a_cancelled_call_is_not_decoded():
    sampler = Recorder()

    async def run():
        engine = InProcessEngine(sampler)
        kept, dropped = asyncio.ensure_future(ask(engine, [1])), asyncio.ensure_future(ask(engine, [2]))
        await asyncio.sleep(0)
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        return await kept

    assert asyncio.run(run()) == [1] and sampler.batches == [[[1]]]


def test_new_weights_reach_the_sampler():
    sampler = Recorder()
    asyncio.run(InProcessEngine(sampler).update_weights({"w": 1}, "5"))
    assert sampler.weights == [({"w": 1}, "5")]
