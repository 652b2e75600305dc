"""Answers' bodies: what can be read, what cannot, and the thread in which it happens."""

import asyncio
import gc
import sys
import threading

import pytest

from miles_sc.rollout.engines.sglang.ingest import AnswerError, BrokenAnswer, Ingest, parse_answer, read_answer


async def read_by(ingest, body, read):
    async def work():
        return read_answer(body, read)

    return await ingest.run(work())


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "miles-sc-ingest"]


@pytest.fixture
def ingest():
    opened = Ingest()
    yield opened
    opened.close()


# --- bodies


def test_an_object_is_an_answer():
    assert parse_answer(b'{"meta_info": {"id": "\xc3\xa9", "p": null}, "n": -1.5e-3}') == {
        "meta_info": {"id": "\u00e9", "p": None},
        "n": -0.0015,
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "zero-length.*0 bytes"),
        (b'{"output_ids":[1,2', r"truncated, or no JSON \(unexpected end.*18 bytes, b'{\"output_ids\":\[1,2'"),
        (b'{"a":"' + 300 * b"x", r"unexpected end.*306 bytes from b'{\"a\":\"xxx.* to b'xxx"),
        (b'{"a":1}{', "unexpected content"),
        (b"<html>Bad gateway</html>", "no JSON .*Bad gateway"),
        (b'{"text":"\xff\xfe"}', "not valid UTF-8"),
        (b'{"text":"\xe2\x82', "not valid UTF-8"),
        (b'{"a":nul', "unexpected end"),
    ],
)
def test_a_broken_body_is_named(body, message):
    with pytest.raises(BrokenAnswer, match=message) as raised:
        parse_answer(body)
    assert len(str(raised.value)) < 500 and raised.value.__cause__ is None


@pytest.mark.parametrize("number", ["NaN", "nan", "Infinity", "-Infinity", "-inf", "-NaN"])
@pytest.mark.parametrize("before", ['{"logprobs":[[', '{"text":"\u20ac NaN","logprobs":[-0.5,'])
def test_no_number_in_a_numbers_place_is_named(number, before):
    with pytest.raises(
        AnswerError, match=f"the answer holds {number}, which is no JSON number, after .*logprobs.*logits"
    ) as raised:
        parse_answer(f"{before}{number},5,null]]}}".encode())
    assert not isinstance(raised.value, BrokenAnswer)


@pytest.mark.parametrize(("body", "kind"), [(b"[1]", "list"), (b"null", "NoneType"), (b'"NaN"', "str"), (b"3", "int")])
def test_json_of_another_kind_is_named(body, kind):
    with pytest.raises(AnswerError, match=f"a JSON {kind} and no object, {len(body)} bytes.*engine's route") as raised:
        parse_answer(body)
    assert not isinstance(raised.value, BrokenAnswer)


# --- the thread


def test_answers_are_read_apart_from_the_event_loop(ingest):
    """The reader waits for what only the event loop does."""
    turned = threading.Event()

    async def main():
        asyncio.get_running_loop().call_later(0.01, turned.set)
        return await read_by(ingest, b'{"a":1}', lambda answer: (answer, turned.wait(10), threading.current_thread()))

    answer, in_time, thread = asyncio.run(main())
    assert (answer, in_time) == ({"a": 1}, True) and thread in threads()


def test_what_a_reader_raises_is_raised(ingest):
    error = KeyError("meta_info")

    def read(answer):
        raise error

    with pytest.raises(KeyError) as raised:
        asyncio.run(read_by(ingest, b"{}", read))
    assert raised.value is error


@pytest.mark.parametrize(("interval", "meanwhile"), [(0.005, 0.001), (0.0005, 0.0005)])
def test_the_interpreters_lock_changes_hands_sooner_while_the_thread_runs(interval, meanwhile):
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        opened = Ingest()
        seen = asyncio.run(read_by(opened, b"{}", lambda answer: sys.getswitchinterval()))
        opened.close()
        assert (seen, sys.getswitchinterval()) == pytest.approx((meanwhile, interval))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("body", [b"{}", b"["])
def test_the_collector_rests_while_an_answer_is_read(ingest, was_on, body):
    seen = []
    (gc.enable if was_on else gc.disable)()
    try:
        outcome = asyncio.run(_outcome(read_by(ingest, body, lambda answer: seen.append(gc.isenabled()))))
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
    assert seen == ([False] if body == b"{}" else []) and (outcome is None) == (body == b"{}")


async def _outcome(work):
    return (await asyncio.gather(work, return_exceptions=True))[0]


def test_a_cancelled_caller_goes_on_when_the_reading_has_ended(ingest):
    begun, go_on, filled = threading.Event(), threading.Event(), []

    def read(answer):
        begun.set()
        go_on.wait(10)
        filled.append(1)

    async def main():
        caller = asyncio.create_task(read_by(ingest, b"{}", read))
        await asyncio.to_thread(begun.wait, 10)
        caller.cancel()
        await asyncio.sleep(0.02)
        assert not caller.done() and not filled
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert filled == [1]

    asyncio.run(main())


def test_a_reading_that_was_cancelled_before_it_began_never_begins(ingest):
    begun, go_on, filled = threading.Event(), threading.Event(), []

    def hold(answer):
        begun.set()
        go_on.wait(10)

    async def main():
        first = asyncio.create_task(read_by(ingest, b"{}", hold))
        await asyncio.to_thread(begun.wait, 10)
        second = asyncio.create_task(read_by(ingest, b"{}", filled.append))
        await asyncio.sleep(0.02)
        second.cancel()
        await asyncio.sleep(0.02)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await second
        await first

    asyncio.run(main())
    assert filled == []


# --- closing


def test_all_share_a_thread_that_ends_with_the_last():
    assert threads() == []
    first, second = Ingest(), Ingest()
    assert len(threads()) == 1
    first.close()
    first.close()
    assert asyncio.run(read_by(second, b'{"a":2}', lambda answer: answer["a"])) == 2
    second.close()
    assert threads() == []
    third = Ingest()
    assert asyncio.run(read_by(third, b'{"a":3}', lambda answer: answer["a"])) == 3
    third.close()
    assert threads() == []


def test_calls_under_way_end_with_an_error_and_before_the_last_act():
    ended, going = [], threading.Event()

    async def call():
        going.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("call")

    async def finish():
        ended.append(threading.current_thread().name)

    async def main():
        ingest, other = Ingest(finish), Ingest()
        under_way = asyncio.create_task(ingest.run(call()))
        await asyncio.to_thread(going.wait, 10)
        await asyncio.to_thread(ingest.close)
        with pytest.raises(ValueError, match="client is closed"):
            await under_way
        assert ended == ["call", "miles-sc-ingest"]
        assert await read_by(other, b"{}", len) == 0
        other.close()

    asyncio.run(main())


@pytest.mark.filterwarnings("error")
def test_nothing_begins_after_closing():
    ingest, filled = Ingest(), []
    ingest.close()
    with pytest.raises(ValueError, match="client is closed: close it after its last call"):
        asyncio.run(read_by(ingest, b"{}", filled.append))
    gc.collect()
    assert filled == []
