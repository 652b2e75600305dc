"""One HTTP call on the server's side: its body, its JSON, and its end when nobody waits for it any more."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect

from miles_sc.rollout.session.errors import SessionError
from miles_sc.rollout.session.limits import flag
from miles_sc.rollout.session.sessions import Session

T = TypeVar("T")
_BODY_SECONDS = 60.0


async def read_body(request: Request, most: int) -> bytes:
    """The body, of at most ``most`` bytes; reading stops there, whatever length was declared.

    Raises:
        SessionError: 408, it does not come; 413; 499, the client hung up.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
    except TimeoutError:
        raise SessionError(f"the body did not come within {_BODY_SECONDS:g} s: send it at once", 408, "body_timeout") from None
    except ClientDisconnect:
        raise SessionError("the client hung up", 499, "client_closed_request") from None
    return b"".join(parts)


def parse_object(body: bytes, allowed: tuple[str, ...] = ()) -> dict[str, Any]:
    """The JSON object of a body; an empty one where fields are ``allowed``, none of which is required.

    Raises:
        SessionError: 400.
    """
    if allowed and not body:
        return {}
    try:
        value = orjson.loads(body)
        orjson.dumps(value)  # what is nested too deeply for this cannot be sent on
    except (orjson.JSONDecodeError, orjson.JSONEncodeError) as error:
        raise SessionError(f"the body is no JSON, or nested too deeply: {error}", 400, "invalid_json") from None
    if not isinstance(value, dict):
        raise SessionError(f"the body is a JSON {type(value).__name__}: send an object", 400, "invalid_json")
    if unknown := allowed and set(value) - set(allowed):
        raise SessionError(f"unknown fields {sorted(unknown)}: this call takes {', '.join(allowed)}", 400, "unknown_field")
    return value


async def attended(request: Request, session: Session, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives; it is cancelled when the client hangs up or the session ends.

    Raises:
        SessionError: 404, the session ended; 499, nobody reads this.
    """
    task = asyncio.create_task(work)
    gone, ended = asyncio.create_task(_disconnected(request)), asyncio.create_task(session.ended.wait())
    try:
        await asyncio.wait((task, gone, ended), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if session.ended.is_set():
            why = f"session {session.id} ended while this call was under way: {session.reason}"
            raise SessionError(why, 404, "unknown_session")
        raise SessionError("the client hung up", 499, "client_closed_request")
    finally:
        for each in (task, gone, ended):
            each.cancel()
        # the engine has been told to stop when this returns
        await asyncio.gather(task, gone, ended, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    # the body has been read, so nothing else can come
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_large(most: int) -> SessionError:
    return SessionError(
        f"the body has more than {most} bytes: send less, or raise {flag('max_body_bytes')}", 413, "body_too_large"
    )
