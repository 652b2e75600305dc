"""The routes."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import orjson
from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException

from miles_sc.rollout.session.assemble import assemble_samples
from miles_sc.rollout.session.calls import attended, parse_object, read_body
from miles_sc.rollout.session.errors import SessionError, answered_with
from miles_sc.rollout.session.exchange import CHAT, Recorder
from miles_sc.rollout.session.limits import SessionLimits
from miles_sc.rollout.session.memory import return_memory
from miles_sc.rollout.session.record import RecordedTurn
from miles_sc.rollout.session.relay import Relay
from miles_sc.rollout.session.sessions import Session, Sessions
from miles_sc.rollout.session.wire import encode_samples

_HOUSEKEEPING_SECONDS = 1.0


class SessionServer:
    """Sessions before one engine.

    Calls of one session may be under way at the same time; each starts or continues a branch, see `assemble_samples`.

    Args:
        recorder: asks the engine on behalf of recorded sessions; closed with the server.
        relay: passes evaluation through; closed with the server.
        api_key: what clients must present as a bearer token; None lets everybody in.
    """

    def __init__(self, recorder: Recorder, relay: Relay, limits: SessionLimits, *, api_key: str | None = None) -> None:
        self.sessions = Sessions(limits)
        self._recorder = recorder
        self._relay = relay
        self._limits = limits
        self._api_key = api_key
        # one at a time: a sample in the making takes twice its session's memory
        self._assembly = ThreadPoolExecutor(1, thread_name_prefix="miles-sc-assembly")

    # --- sessions

    async def create(self, request: Request) -> Response:
        asked = parse_object(await self._body(request), ("evaluation",))
        evaluation = asked.get("evaluation", False)
        if not isinstance(evaluation, bool):
            raise SessionError(f"evaluation = {evaluation!r}: give true or false", 400, "invalid_field")
        return _json({"session_id": self.sessions.create(evaluation=evaluation).id})

    async def overview(self) -> Response:
        return _json(self.sessions.summary())

    async def describe(self, session_id: str) -> Response:
        return _json(self.sessions.get(session_id).summary())

    async def delete(self, session_id: str) -> Response:
        session = self.sessions.get(session_id)
        summary = session.summary()
        self.sessions.end(session, "it was deleted")
        return _json({"deleted": session_id, "turns": summary["turns"], "bytes_freed": summary["bytes_held"]})

    async def samples(self, session_id: str, request: Request) -> Response:
        session = self.sessions.get(session_id)
        asked = parse_object(await self._body(request), ("history",))
        if session.evaluation:
            raise SessionError(f"session {session_id} is for evaluation: nothing was recorded", 409, "evaluation_session")
        if session.calls:
            raise SessionError(f"{session.calls} calls of session {session_id} are under way: wait for them", 409, "busy")
        with answered_with(422, "cannot_assemble"):
            body, dropped = await self._assemble(tuple(session.turns), asked.get("history", "linear"))
        return Response(body, headers={"x-dropped-tokens": str(dropped)}, media_type="application/octet-stream")

    # --- what agents call

    async def models(self, session_id: str) -> Response:
        self.sessions.get(session_id)
        return await self._relay.forward("GET", "/v1/models")

    async def chat_completions(self, session_id: str, request: Request) -> Response:
        session = self.sessions.get(session_id)
        body = await self._body(request)
        with self.sessions.call(session) as arrival:
            if session.evaluation:
                return await attended(request, session, self._relay.forward("POST", CHAT, body))
            return await self._recorded(session, request, body, arrival)

    async def _recorded(self, session: Session, request: Request, body: bytes, arrival: int) -> Response:
        asked = parse_object(body)
        exchange = await attended(request, session, self._recorder.exchange(asked, session.said, arrival))
        self.sessions.record(session, exchange)
        return Response(exchange.reply, media_type=exchange.media_type)

    # --- life

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        housekeeping = asyncio.create_task(self._keep_house())
        yield
        housekeeping.cancel()
        await asyncio.gather(housekeeping, return_exceptions=True)
        self._assembly.shutdown(cancel_futures=True)
        await self._recorder.close()
        await self._relay.close()

    async def admit(self, request: Request) -> None:
        """Raises SessionError, 401, for a call without the key."""
        key = self._api_key
        presented = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key is not None and not hmac.compare_digest(presented.encode(), key.encode()):
            raise SessionError("the server's API key is missing or wrong: send it as Authorization: Bearer KEY", 401, "no_key")

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            self.sessions.expire()
            if self.sessions.released:
                self.sessions.released = 0
                await asyncio.to_thread(return_memory)

    async def _assemble(self, turns: Sequence[RecordedTurn], history: object) -> tuple[bytes, int]:
        """Samples on the wire, and how many generated tokens are not in them since a template left them out."""

        def assemble() -> tuple[bytes, int]:
            samples = assemble_samples(turns, history)
            dropped = sum(len(turn.generated) for turn in turns) - sum(sum(sample.loss_mask) for sample in samples)
            return encode_samples(samples), dropped

        return await asyncio.get_running_loop().run_in_executor(self._assembly, assemble)

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._limits.max_body_bytes)


def create_app(server: SessionServer) -> FastAPI:
    """The application around a server; it closes the server's clients when it ends."""
    app = FastAPI(title="miles-sc session server", openapi_url=None, lifespan=server.lifespan)
    keyed = [Depends(server.admit)]
    for method, path, endpoint in (
        ("POST", "/sessions", server.create),
        ("GET", "/sessions", server.overview),
        ("GET", "/sessions/{session_id}", server.describe),
        ("DELETE", "/sessions/{session_id}", server.delete),
        ("POST", "/sessions/{session_id}/samples", server.samples),
        ("GET", "/sessions/{session_id}/v1/models", server.models),
        ("POST", f"/sessions/{{session_id}}{CHAT}", server.chat_completions),
    ):
        app.add_api_route(path, endpoint, methods=[method], dependencies=keyed)
    app.add_api_route("/health", _healthy, methods=["GET"])
    app.add_exception_handler(SessionError, _tell)
    app.add_exception_handler(HTTPException, _tell_routing)
    app.add_exception_handler(Exception, _tell_defect)
    return app


async def _healthy() -> Response:
    return _json({"status": "ok"})


async def _tell(request: Request, error: SessionError) -> Response:
    return Response(error.body, error.status, error.headers, media_type="application/json")


async def _tell_routing(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}; agents call POST /sessions/ID{CHAT}"
    return await _tell(request, SessionError(message, error.status_code, "no_such_route"))


async def _tell_defect(request: Request, error: Exception) -> Response:
    # its traceback is in the server's log
    message = f"the session server failed: {type(error).__name__}: {error}"
    return await _tell(request, SessionError(message, 500, "internal_error"))


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
