"""Calls to an engine over HTTP: retried, timed and aborted."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx
import orjson

from miles_sc.rollout.engines.sglang.ingest import AnswerError, BrokenAnswer, Ingest, parse_answer, parse_json, read_answer

T = TypeVar("T")
logger = logging.getLogger(__name__)

# SGLang closes a connection that was idle for 5 s: one given up well before is never used at the moment it closes
_IDLE_SECONDS = 2.0
_ABORT_SECONDS = 2.0
_QUOTED_CHARACTERS = 500
_TRANSIENT_STATUSES = frozenset({408, 425, 429})
_REMEDIES = {
    401: "give the engine's api_key",
    403: "give the engine's api_key",
    404: "does the engine, or the router before it, serve this route?",
    429: "the engine is overloaded: lower max_connections",
    503: "the engine is starting, stopping or overloaded: wait, or lower max_connections",
}


class EngineError(ValueError):
    """A call that was not answered as asked; its cause is a ``TimeoutError`` where the answer did not come in time.

    Attributes:
        status: the answer's HTTP status; None where none came.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ClientSettings:
    """How patient a client is, and how busy.

    Attributes:
        request_timeout: seconds for one answer.
        connect_timeout: seconds until a server is reached.
        attempts: in all, where another may help.
        backoff: seconds before the second attempt, doubled after each.
        max_connections: generations under way at once, each until its answer is read; others wait, which no time-out counts.
    """

    request_timeout: float = 600.0
    connect_timeout: float = 5.0
    attempts: int = 4
    backoff: float = 0.5
    max_connections: int = 64

    def __post_init__(self) -> None:
        for name in ("attempts", "max_connections"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: give 1 or more")
        for name in ("request_timeout", "connect_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: give seconds above 0")
        if not self.backoff >= 0:
            raise ValueError(f"backoff = {self.backoff}: give seconds, or 0 for none")


class EngineClient:
    """One engine, or the router before several; calls may come from any event loop.

    A call is made again after 408, 425, 429 and 5xx, a refused, reset or broken connection, a truncated answer and a time-out;
    what an engine must not be told twice needs a client with ``attempts=1``. Proxies named by the environment are not used: an
    engine is on this machine or in its cluster, where a proxy for downloads does not lead.

    Args:
        url: ``http://host:port``, or ``host:port``.
        api_key: sent as a bearer token.
        abort_urls: who is told to abort a call; by default the same. A router passes no aborts on: name its engines.

    Raises:
        ValueError: no HTTP address.
    """

    def __init__(
        self,
        url: str,
        settings: ClientSettings = ClientSettings(),
        *,
        api_key: str | None = None,
        abort_urls: Sequence[str] = (),
    ) -> None:
        self.url = _http_address(url)
        self._abort_urls = [_http_address(engine) for engine in abort_urls] or [self.url]
        self._settings = settings
        # uncompressed: trainer and engine are neighbours
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=settings.connect_timeout),
            # unlimited: the slots limit generations, and neither abort nor control call waits for one
            limits=httpx.Limits(max_keepalive_connections=settings.max_connections, keepalive_expiry=_IDLE_SECONDS),
            trust_env=False,
        )
        self._slots = asyncio.Semaphore(settings.max_connections)
        self._ingest = Ingest(finish=self._http.aclose)

    async def get(self, path: str) -> dict[str, Any] | list[Any]:
        """Small JSON. Text of another type comes as ``{"message": text}``, an empty answer as ``{}``.

        Raises:
            EngineError: no answer, a status other than 2xx, or broken JSON.
        """
        return await self._ingest.run(self._control("GET", path, None, parse_json))

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A control call, answered as `get`; it never waits for generations.

        Raises:
            EngineError: no answer, a status other than 2xx, or no JSON object.
        """
        return await self._ingest.run(self._control("POST", path, orjson.dumps(dict(body)), parse_answer))

    async def ask(self, path: str, body: Mapping[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """One generation, parsed and read off the event loop.

        It carries ``rid``, the body's own or a new one, and a repetition always a new one. When it times out or its caller is
        cancelled, the engine is told to abort it.

        Args:
            path: ``/generate`` or ``/v1/chat/completions``.
            body: not touched; must not change before the answer is here.
            read: makes of the answer what is returned, within milliseconds, in another thread.

        Raises:
            EngineError: no answer, a status other than 2xx, or no JSON object.
            Exception: whatever ``read`` raises, without another attempt.
        """
        return await self._ingest.run(self._generate(path, body, partial(read_answer, read=read)))

    async def close(self) -> None:
        """Ends calls under way, connections and the thread; may be called again."""
        await asyncio.to_thread(self._ingest.close)

    async def _generate(self, path: str, body: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        rid = body.get("rid")

        async def attempt() -> T:
            nonlocal rid
            # unrelated to the last: SGLang aborts every call whose rid begins with the one that it is given
            this, rid = rid or uuid.uuid4().hex, None
            try:
                response = await self._exchange("POST", path, orjson.dumps({**body, "rid": this}))
            except (asyncio.CancelledError, _TimedOut):
                await self._abort(this)
                raise
            return _read(response, read)

        async with self._slots:
            return await self._repeated("POST", path, attempt)

    async def _control(self, method: str, path: str, content: bytes | None, parse: Callable[[bytes], T]) -> T | dict[str, str]:
        async def attempt() -> T | dict[str, str]:
            response = await self._exchange(method, path, content)
            if response.headers.get("Content-Type", "").startswith("application/json"):
                return _read(response, parse)
            return {"message": response.text} if response.content else {}

        return await self._repeated(method, path, attempt)

    async def _repeated(self, method: str, path: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """The first attempt that comes to something."""
        attempts, pause = self._settings.attempts, self._settings.backoff
        for number in itertools.count(1):
            try:
                return await attempt()
            except _Failure as failure:
                message = f"{method} {self.url}{path}, attempt {number} of {attempts}: {failure}"
                if number == attempts or not failure.transient:
                    raise EngineError(message, failure.status) from failure.__cause__
            logger.warning("%s; again in %g s", message, pause)
            await asyncio.sleep(pause)
            pause *= 2

    async def _exchange(self, method: str, path: str, content: bytes | None) -> httpx.Response:
        """One request and its whole answer, of status 2xx."""
        limit = self._settings.request_timeout
        try:
            async with asyncio.timeout(limit):
                response = await self._http.request(method, self.url + path, content=content)
        except TimeoutError as error:
            raise _TimedOut(f"no answer within {limit:g} s; raise request_timeout if it is only slow") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _Failure(f"cannot connect ({_named(error)}); is the engine running at this address?") from error
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise _Failure(f"the connection broke ({_named(error)}); the engine's log may say why") from error
        if not response.is_success:
            raise _refusal(response)
        return response

    async def _abort(self, rid: str) -> None:
        """Tells the engine to end a generation; best effort, since it also ends what nobody is connected to."""
        await asyncio.gather(*(self._abort_at(url, rid) for url in self._abort_urls))

    async def _abort_at(self, url: str, rid: str) -> None:
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                response = await self._http.post(f"{url}/abort_request", content=orjson.dumps({"rid": rid}))
        except (TimeoutError, httpx.HTTPError) as error:
            logger.warning("%s was not told to abort %s: %s", url, rid, _named(error))
            return
        if not response.is_success:
            logger.warning("%s does not abort %s, which may run on: status %d", url, rid, response.status_code)


class _Failure(Exception):
    """One attempt came to nothing."""

    def __init__(self, message: str, status: int | None = None, *, transient: bool = True) -> None:
        super().__init__(message)
        self.status, self.transient = status, transient


class _TimedOut(_Failure):
    """The engine may still be at work on it."""


def _refusal(response: httpx.Response) -> _Failure:
    status = response.status_code
    remedy = _REMEDIES.get(status, "the engine's log says more" if status >= 500 else "correct what the server names")
    transient = status >= 500 or status in _TRANSIENT_STATUSES
    return _Failure(f"answered {status}: {_shortened(response.text)}; {remedy}", status, transient=transient)


def _read(response: httpx.Response, read: Callable[[bytes], T]) -> T:
    try:
        return read(response.content)
    except AnswerError as error:
        raise _Failure(str(error), response.status_code, transient=isinstance(error, BrokenAnswer)) from error


def _http_address(url: str) -> str:
    address = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parsed = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ValueError(f"url = {url!r} ({error}): give http://host:port") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url = {url!r}: give http://host:port")
    return address


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _QUOTED_CHARACTERS else f"{text[:_QUOTED_CHARACTERS]} ..."
