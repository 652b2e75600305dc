"""Answers of an engine, parsed and read in threads of their own so that the event loop keeps turning."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson

T = TypeVar("T")

_NO_JSON_NUMBER = re.compile(r"-?(NaN|Inf)", re.IGNORECASE)


class AnswerError(ValueError):
    """A body that cannot be read as an answer."""


class BrokenAnswer(AnswerError):
    """A body that was cut short or damaged on its way; asking again may help."""


def parse_answer(body: bytes) -> dict[str, Any]:
    """The JSON object that an answer's body holds.

    Raises:
        BrokenAnswer: the body is empty, truncated or no JSON.
        AnswerError: it holds NaN or an infinity in a number's place, or is JSON but no object.
    """
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # not chained: the decoder's error holds a copy of the whole body
        raise _unreadable(body, error) from None
    if not isinstance(answer, dict):
        raise AnswerError(f"the answer is a JSON {type(answer).__name__} and no object: {_both_ends(body)}; is this the engine's route?")
    return answer


def _unreadable(body: bytes, error: orjson.JSONDecodeError) -> AnswerError:
    # the decoder points at a minus sign's successor
    for at in (error.pos, error.pos - 1):
        if found := _NO_JSON_NUMBER.match(error.doc, max(at, 0)):
            return AnswerError(
                f"the answer holds {found[0]} in a number's place (after {error.doc[max(at - 60, 0):at]!r}), which is no JSON: the "
                "model computed it, so look at its weights and logits; SGLang itself would send null, so some layer wrote the "
                "body anew"
            )
    return BrokenAnswer(f"the answer is truncated or no JSON ({error.msg}): {_both_ends(body)}")


def _both_ends(body: bytes) -> str:
    if len(body) <= 120:
        return f"{len(body)} bytes, {body!r}"
    return f"{len(body)} bytes, from {body[:60]!r} to {body[-60:]!r}"


class Ingest:
    """Worker threads in which answers are parsed and read.

    One thread is best: parsing holds the interpreter's lock, so that a second one would only compete with the event loop.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="miles-sc-ingest")

    async def read(self, body: bytes, read: Callable[[dict[str, Any]], T]) -> T:
        """``read(parse_answer(body))``, computed in a worker thread.

        Once it has begun, a cancelled caller waits for it: what ``read`` fills in does not change after its caller has gone on.

        Raises:
            AnswerError: the body, see `parse_answer`.
            Exception: whatever ``read`` raises.
        """
        job = self._threads.submit(_parse_and_read, body, read)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            await asyncio.gather(asyncio.wrap_future(job), return_exceptions=True)
            raise

    def close(self) -> None:
        """Ends the threads, after the answers that are being read; may be called again."""
        self._threads.shutdown(cancel_futures=True)


def _parse_and_read(body: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    with _COLLECTOR.paused():
        # the answer's many small objects are freed here, not on the event loop
        return read(parse_answer(body))


class _Collector:
    """The garbage collector, kept off while answers are read.

    A nested answer is a hundred thousand containers, none of them garbage; their number sets off full collections, each of which
    walks all objects of the process while every thread waits (0.12 s beside torch and transformers).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._was_on = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock:
            self._readers += 1
            if self._readers == 1:
                self._was_on = gc.isenabled()
                gc.disable()
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                if self._readers == 0 and self._was_on:
                    gc.enable()


_COLLECTOR = _Collector()
