"""Calls to an engine over HTTP: retried, timed, aborted; answers are read off the event loop."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import orjson

from miles_sc.rollout.engines.sglang.ingest import AnswerError, BrokenAnswer, Ingest

T = TypeVar("T")
logger = logging.getLogger(__name__)

# SGLang closes a connection that has been idle for 5 s; one that is dropped well before is never used while it closes.
_IDLE_CONNECTION_SECONDS = 2.0
_ABORT_SECONDS = 2.0
# What a server that is starting, overloaded or slow says; any other 4xx would come again.
_TRANSIENT = frozenset({408, 425, 429})
_QUOTED_CHARACTERS = 500


class EngineError(ValueError):
    """A call that the engine did not answer as asked.

    Attributes:
        status: the HTTP status; None where no answer came.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ClientSettings:
    """How patient a client is.

    Attributes:
        request_timeout: seconds for one answer, from the moment the call is sent.
        connect_timeout: seconds to reach the server.
        attempts: in all, for what a second attempt may mend.
        backoff: seconds before the second attempt, doubled after each.
        max_connections: generations under way at once, each until its answer has been read; others wait, which no time-out counts.
    """

    request_timeout: float = 600.0
    connect_timeout: float = 5.0
    attempts: int = 4
    backoff: float = 0.5
    max_connections: int = 64

    def __post_init__(self) -> None:
        for name, least in (("attempts", 1), ("max_connections", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: give {least} or more")
        for name in ("request_timeout", "connect_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: give a number of seconds above 0")
        if not self.backoff >= 0:
            raise ValueError(f"backoff = {self.backoff}: give a number of seconds, 0 or more")


@dataclass(eq=False)
class _Failed(Exception):
    """One attempt came to nothing."""

    cause: str
    remedy: str
    status: int | None = None
    transient: bool = True
    timed_out: bool = False


class EngineClient:
    """One engine, or a router before several, seen from one event loop.

    Every call is repeated, with a growing pause, after 408, 425, 429 and 5xx, a refused, reset or broken connection, a truncated
    answer and a time-out. What must not reach the engine twice needs a client with ``attempts=1``.

    Proxies of the environment are not used: engines are on this machine or in its cluster, and a proxy meant for downloads
    would not reach them or would buffer their answers.

    Args:
        url: ``http://host:port``, or ``host:port``.
        api_key: sent as a bearer token.
    """

    def __init__(self, url: str, settings: ClientSettings = ClientSettings(), *, api_key: str | None = None) -> None:
        self.url = _normalised(url)
        self._settings = settings
        # engine and trainer are neighbours, and decompression would hold up the event loop
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            trust_env=False,
            timeout=httpx.Timeout(None, connect=settings.connect_timeout),
            # the slots are the limit; aborts and control calls must not wait for a connection
            limits=httpx.Limits(
                max_keepalive_connections=settings.max_connections, keepalive_expiry=_IDLE_CONNECTION_SECONDS
            ),
        )
        self._slots = asyncio.Semaphore(settings.max_connections)
        self._ingest = Ingest()

    async def get(self, path: str) -> dict[str, Any] | list[Any]:
        """Small JSON. An answer of another kind comes as ``{"message": text}``, an empty one as ``{}``.

        Raises:
            EngineError: no answer, one with a status other than 2xx, or broken JSON.
        """
        return await self._repeated("GET", path, lambda: self._control("GET", path, None))

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A control call with a small answer, read as by `get`; it does not wait for a generation's slot.

        Raises:
            EngineError: no answer, one with a status other than 2xx, or JSON that is no object.
        """
        return await self._repeated("POST", path, lambda: self._control("POST", path, orjson.dumps(dict(body))))

    async def ask(self, path: str, body: Mapping[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """One generation, read.

        The call carries ``rid``, the request's own or a new one; a repetition has a new one. If it times out or its caller is
        cancelled, the engine is told to abort it.

        Args:
            path: ``/generate`` or ``/v1/chat/completions``.
            body: not touched.
            read: makes of the answer what is returned; runs in another thread.

        Raises:
            EngineError: no answer, one with a status other than 2xx, or none that can be parsed.
            Exception: whatever ``read`` raises, without another attempt.
        """
        return await self._generate(path, body, lambda answer: self._ingest.read(answer, read))

    async def ask_bytes(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The same generation as the bytes that came.

        Raises:
            EngineError: no answer, or one with a status other than 2xx.
        """
        return await self._generate(path, body, _as_it_came)

    async def close(self) -> None:
        """Ends threads and connections; may be called again."""
        await self._http.aclose()
        self._ingest.close()

    async def _generate(self, path: str, body: Mapping[str, Any], accept: Callable[[bytes], Awaitable[T]]) -> T:
        rid = body.get("rid")

        async def attempt() -> T:
            nonlocal rid
            # no repetition's begins with an earlier one: SGLang aborts every call whose rid begins with the one that it is given
            this, rid = rid or uuid.uuid4().hex, None
            try:
                response = await self._exchange("POST", path, orjson.dumps({**body, "rid": this}))
            except (asyncio.CancelledError, _TimedOut):
                await self._abort(this)
                raise
            return await accept(response.content)

        # held until the answer is read, so that no more than this many unread answers pile up
        async with self._slots:
            return await self._repeated("POST", path, attempt)

    async def _control(self, method: str, path: str, content: bytes | None) -> Any:
        response = await self._exchange(method, path, content)
        if response.headers.get("Content-Type", "").startswith("application/json"):
            return orjson.loads(response.content)
        return {"message": response.text} if response.content else {}

    async def _repeated(self, method: str, path: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """The first attempt that comes to something."""
        attempts = self._settings.attempts
        for number in range(1, attempts + 1):
            try:
                return await attempt()
            except AnswerError as error:
                failed = _Failed(str(error), "", 200, transient=isinstance(error, BrokenAnswer))
            except _Failed as error:
                failed = error
            if not failed.transient or number == attempts:
                raise EngineError(f"{method} {self.url}{path}: {failed.cause} (attempt {number} of {attempts}); {failed.remedy}", failed.status) from failed
            await asyncio.sleep(self._settings.backoff * 2 ** (number - 1))

    async def _exchange(self, method: str, path: str, content: bytes | None) -> httpx.Response:
        """One request and its whole answer, of status 2xx."""
        limit = self._settings.request_timeout
        try:
            async with asyncio.timeout(limit):
                response = await self._http.request(method, self.url + path, content=content)
        except TimeoutError as error:
            raise _TimedOut(f"no answer within {limit:g} s", "") from error
        except (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise _Failed(f"{type(error).__name__}: {error}", "") from error
        if not response.is_success:
            raise _Failed(f"answered {response.status_code}: {response.text[:500]}", "", response.status_code, transient=response.status_code >= 500 or response.status_code in _TRANSIENT)
        return response

    async def _abort(self, rid: str) -> None:
        """Tells the engine to stop; best effort."""
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self._http.post(self.url + "/abort_request", content=orjson.dumps({"rid": rid}))
        except (TimeoutError, httpx.HTTPError) as error:
            logger.warning("could not abort call %s at %s: %r", rid, self.url, error)


class _TimedOut(_Failed):
    pass


async def _as_it_came(body: bytes) -> bytes:
    return body


def _normalised(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/")
