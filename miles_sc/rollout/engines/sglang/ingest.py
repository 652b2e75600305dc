"""Answers of an engine: parsed, and taken in by a thread of their own so that the caller's event loop keeps turning."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import orjson

T = TypeVar("T")

_NO_JSON_NUMBER = re.compile(r"-?(NaN|Inf(inity)?)", re.IGNORECASE)
_QUOTED_BYTES = 60
_SWITCH_SECONDS = 0.001


class AnswerError(ValueError):
    """A body that is no answer."""


class BrokenAnswer(AnswerError):
    """A body that was cut short or damaged on its way; asking again may help."""


def parse_json(body: bytes) -> Any:
    """Strict JSON.

    Raises:
        BrokenAnswer: the body is empty, truncated or no JSON.
        AnswerError: NaN or an infinity stands in a number's place.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # not chained: the decoder's error holds the whole body
        raise _unreadable(body, error) from None


def parse_answer(body: bytes) -> dict[str, Any]:
    """The JSON object that an answer is; `parse_json`'s errors besides.

    Raises:
        AnswerError: it is JSON of another kind.
    """
    answer = parse_json(body)
    if not isinstance(answer, dict):
        raise AnswerError(
            f"the answer is a JSON {type(answer).__name__} and no object, {_both_ends(body)}; is this the engine's route?"
        )
    return answer


def read_answer(body: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    """``read(parse_answer(body))`` with the garbage collector off; for one thread at a time.

    A nested answer is a hundred thousand containers, none of them garbage. Their number sets off full collections, and each walks
    all objects of the process while every thread waits: 0.12 s beside torch and transformers, ten times what the answer takes.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        return read(parse_answer(body))  # its parts are freed in here as well, and not on the event loop
    finally:
        if was_on:
            gc.enable()


def _unreadable(body: bytes, error: orjson.JSONDecodeError) -> AnswerError:
    # of a negative one the decoder names the place behind the sign
    for place in (error.pos - 1, error.pos):
        if place >= 0 and (found := _NO_JSON_NUMBER.match(error.doc, place)):
            before = error.doc[max(place - _QUOTED_BYTES, 0) : place]
            return AnswerError(
                f"the answer holds {found[0]}, which is no JSON number, after {before!r}; look at the model's logits, and at "
                "what lies between here and the engine (SGLang writes null)"
            )
    return BrokenAnswer(
        f"the answer is truncated, or no JSON ({error.msg}), {_both_ends(body)}; what lies between here and the engine may cut it"
    )


def _both_ends(body: bytes) -> str:
    if len(body) <= 2 * _QUOTED_BYTES:
        return f"{len(body)} bytes, {body!r}"
    return f"{len(body)} bytes from {body[:_QUOTED_BYTES]!r} to {body[-_QUOTED_BYTES:]!r}"


class Ingest:
    """Calls that are made, and whose answers are read, in a thread with an event loop of its own.

    All ingests of a process share one thread, since the interpreter's lock lets one run: a second would read nothing sooner, and
    the caller's event loop would wait behind both. Calls are made there too, because each receive on the caller's loop would
    give the lock away and wait for it: 64 answers of 512 tokens with 128 candidates then hold that loop up for 0.1 s at a time.

    Args:
        finish: awaited in the thread on closing, after the calls have ended.
    """

    def __init__(self, finish: Callable[[], Awaitable[None]] | None = None) -> None:
        self._finish = finish
        self._tasks: set[asyncio.Task] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._loop = _THREAD.enter()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits a coroutine in the thread.

        If the caller is cancelled, so is the coroutine, and the caller goes on when it has ended: nothing is filled in later.

        Raises:
            ValueError: closed, before or on the way.
            Exception: whatever the coroutine raises.
        """
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()  # from here on only the coroutine ends it
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda task: _hand_over(task, result))

        if not self._call_soon(start):
            work.close()
            raise _closed()
        answered = asyncio.wrap_future(result)
        try:
            return await asyncio.shield(answered)
        except asyncio.CancelledError:
            self._call_soon(lambda: tasks[0].cancel())
            await asyncio.gather(answered, return_exceptions=True)
            raise

    def close(self) -> None:
        """Cancels the calls under way; ends the thread with the last ingest of the process. May be called again."""
        ended: Future[None] = Future()

        def end() -> None:
            self._loop.create_task(self._end()).add_done_callback(lambda task: _hand_over(task, ended))

        if self._call_soon(end, last=True):
            try:
                ended.result()
            finally:
                _THREAD.leave()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._finish is not None:
            await self._finish()

    def _call_soon(self, callback: Callable[[], object], *, last: bool = False) -> bool:
        """Has a callback run in the thread, unless this is closed; none is accepted after the last."""
        with self._lock:
            accepted = not self._closed
            if accepted:
                self._loop.call_soon_threadsafe(callback)
                self._closed = last
            return accepted


def _hand_over(task: asyncio.Task[T], result: Future[T]) -> None:
    if task.cancelled():
        result.set_exception(_closed())
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())


def _closed() -> ValueError:
    return ValueError("the engine's client is closed: close it after its last call")


class _Thread:
    """An event loop that turns in a thread while anybody uses it.

    Meanwhile the interpreter's lock changes hands after 1 ms of Python and not 5: the caller's loop asks for it twice a turn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def enter(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._users == 0:
                self._loop, self._left = asyncio.new_event_loop(), asyncio.Event()
                self._thread = threading.Thread(target=self._turn, name="miles-sc-ingest", daemon=True)
                self._thread.start()
            self._users += 1
            return self._loop

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._loop.call_soon_threadsafe(self._left.set)
                self._thread.join()

    def _turn(self) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(interval, _SWITCH_SECONDS))
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._left.wait())
        sys.setswitchinterval(interval)


_THREAD = _Thread()
