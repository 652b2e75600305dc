"""An embedded sampler behind the `Engine` protocol: calls that are made together are decoded as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class BatchSampler(Protocol):
    """`EmbeddedEngine`, or whatever answers a list of requests at once."""

    def generate(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]: ...

    def update_weights(self, state: Mapping[str, Any], version: str) -> None: ...


class InProcessEngine:
    """Collects the calls of one turn of the event loop and lets the sampler decode them together.

    Coroutines started by one ``gather`` therefore share a batch, and so do their next calls after it: which calls meet does not
    depend on timing. Decoding blocks the event loop, which has nothing else to do; a call is never under way while other code
    runs, so there is never anything to abort.
    """

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler
        self._waiting: list[tuple[Mapping[str, Any], asyncio.Future]] = []

    async def generate(self, request: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._decode_waiting)
        self._waiting.append((request, answered := loop.create_future()))
        return read(await answered)

    async def update_weights(self, state: Mapping[str, Any], version: str) -> None:
        self._sampler.update_weights(state, version)

    async def abort(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def _decode_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        waiting = [(request, answered) for request, answered in waiting if not answered.cancelled()]
        if not waiting:
            return
        try:
            answers = self._sampler.generate([request for request, _ in waiting])
        except Exception as error:  # handed to every caller, none of whom has an answer
            for _, answered in waiting:
                answered.set_exception(error)
            return
        for (_, answered), answer in zip(waiting, answers, strict=True):
            answered.set_result(answer)
