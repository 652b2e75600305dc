"""Calls that pass through as they are: evaluation, and questions about the engine."""

import asyncio

import httpx
from fastapi import Response

from miles_sc.rollout.session.errors import SessionError

_CONNECT_SECONDS = 5.0
_IDLE_CONNECTION_SECONDS = 2.0


class Relay:
    """Sends a body on byte for byte and answers status, type and bytes that came; a stream in one piece. Nothing is repeated.

    Args:
        url: the engine's.
        timeout: seconds for one answer.
        connections: at most, at the same time.
        api_key: sent as a bearer token.
    """

    def __init__(self, url: str, *, timeout: float, connections: int, api_key: str | None = None) -> None:
        self._url = url
        self._timeout = timeout
        self._http = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            trust_env=False,
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=_IDLE_CONNECTION_SECONDS),
        )

    async def forward(self, method: str, path: str, body: bytes = b"") -> Response:
        """The engine's answer, whatever its status.

        Raises:
            SessionError: 502 if no answer came, 504 if none came in time.
        """
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._http.request(method, self._url + path, content=body, headers=headers)
        except TimeoutError as error:
            message = f"{method} {self._url}{path}: no answer within {self._timeout:g} s"
            raise SessionError(message, 504, "engine_timeout") from error
        except httpx.HTTPError as error:
            message = f"{method} {self._url}{path}: {type(error).__name__}: {error}; does the engine run there?"
            raise SessionError(message, 502, "engine_unreachable") from error
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("Content-Type"))

    async def close(self) -> None:
        await self._http.aclose()
