"""The routes."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import orjson
from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import EngineClient, EngineError
from miles_sc.rollout.session.assemble import assemble_samples
from miles_sc.rollout.session.calls import answered_with, attended, parse_object, read_body
from miles_sc.rollout.session.errors import SessionError
from miles_sc.rollout.session.limits import SessionLimits
from miles_sc.rollout.session.memory import return_memory
from miles_sc.rollout.session.proxy import Wishes, added_fields, client_reply, engine_request
from miles_sc.rollout.session.record import RecordedTurn, read_turn
from miles_sc.rollout.session.relay import Relay
from miles_sc.rollout.session.sessions import Session, Sessions
from miles_sc.rollout.session.stream import event_stream
from miles_sc.rollout.session.wire import encode_samples

CHAT = "/v1/chat/completions"
_HOUSEKEEPING_SECONDS = 1.0
# Refusals that are about the engine's credentials or addresses, not about what the client said.
_OUR_FAULT = frozenset({401, 403, 404, 405})


@dataclass(frozen=True)
class SessionSettings:
    """What all sessions of a server have in common.

    Attributes:
        config: sampler and candidates of the run; K = 0 records tokens and log-probs alone.
        vocab_size: the engine's; None leaves ids unbounded.
        limits: see `SessionLimits`.
        api_key: what clients must present as a bearer token; None lets everybody in.
    """

    config: ScoreCenteringConfig
    vocab_size: int | None
    limits: SessionLimits = SessionLimits()
    api_key: str | None = None


class SessionServer:
    """Sessions before one engine.

    Calls of one session may be under way at the same time; each starts or continues a branch, see `assemble_samples`.
    """

    def __init__(self, engine: EngineClient, relay: Relay, settings: SessionSettings) -> None:
        self.sessions = Sessions(settings.limits)
        self._engine = engine
        self._relay = relay
        self._settings = settings
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
        sessions, limits = self.sessions, asdict(self._settings.limits)
        return _json({"sessions": len(sessions), "bytes_held": sessions.nbytes, "limits": limits})

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
            body, dropped = await self._assemble(session.turns, asked.get("history", "linear"))
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
        with answered_with(400, "refused"):
            wishes = Wishes.of(asked)
            to_engine = engine_request(self._settings.config, asked, wishes)

        def read(answer: dict) -> tuple[RecordedTurn, bytes]:
            turn = read_turn(answer, self._settings.config, vocab_size=self._settings.vocab_size, arrival=arrival)
            reply = client_reply(answer, wishes)
            return turn, event_stream(reply, usage=wishes.usage) if wishes.stream else orjson.dumps(reply)

        try:
            turn, reply = await attended(request, session, self._engine.ask(CHAT, to_engine, read))
        except SessionError:
            raise
        except EngineError as error:
            raise _told_by_engine(error, added_fields(asked, to_engine)) from error
        except ValueError as error:  # what `read` found
            raise SessionError(str(error), 502, "not_recorded") from error
        self.sessions.record(session, turn)
        return Response(reply, media_type="text/event-stream" if wishes.stream else "application/json")

    # --- life

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        housekeeping = asyncio.create_task(self._keep_house())
        yield
        housekeeping.cancel()
        await asyncio.gather(housekeeping, return_exceptions=True)
        self._assembly.shutdown(cancel_futures=True)
        await self._engine.close()
        await self._relay.close()

    async def admit(self, request: Request) -> None:
        """Raises SessionError, 401, for a call without the key."""
        key = self._settings.api_key
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
        return await read_body(request, self._settings.limits.max_body_bytes)


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


def _told_by_engine(error: EngineError, added: str) -> SessionError:
    """The engine's refusal of what its client said stays the client's; what the engine lacks is a fault behind this server."""
    status = error.status
    if status is None:
        return (
            SessionError(str(error), 504, "engine_timeout")
            if _timed_out(error)
            else SessionError(str(error), 502, "engine_failed")
        )
    if status == 504:
        return SessionError(str(error), 504, "engine_timeout")
    if status in (429, 503):
        return SessionError(str(error), 503, "engine_busy")
    if not 400 <= status < 500 or status in _OUR_FAULT:
        return SessionError(str(error), 502, "engine_failed")
    return SessionError(f"{error}; the session server had added {added}", status, "engine_refused")


def _timed_out(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, TimeoutError):
        error = error.__cause__
    return error is not None


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
