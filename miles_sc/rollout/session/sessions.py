"""The sessions that are open, what they hold, and when they end."""

import asyncio
import bisect
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from miles_sc.rollout.session.errors import SessionError
from miles_sc.rollout.session.exchange import Exchange
from miles_sc.rollout.session.limits import SessionLimits, flag
from miles_sc.rollout.session.record import RecordedTurn

_REMEMBERED_ENDS = 10_000


class Session:
    """One agent's conversation, or several branches of it.

    Attributes:
        id: hard to guess; whoever knows it may use the session.
        evaluation: nothing is recorded.
        turns: in the order in which their calls came in.
        said: each turn by the digest of what had been said when it had answered.
        prompts: how many calls' prompts came from where, see `miles_sc.rollout.session.continuation`.
        nbytes: of the recorded arrays.
        calls: under way.
        ended: set when the session ends, with ``reason``.
    """

    def __init__(self, *, evaluation: bool) -> None:
        self.id = secrets.token_hex(16)
        self.evaluation = evaluation
        self.turns: list[RecordedTurn] = []
        self.said: dict[bytes, RecordedTurn] = {}
        self.prompts: Counter[str] = Counter()
        self.nbytes = 0
        self.calls = 0
        self.ended = asyncio.Event()
        self.reason = ""
        self.created = self.used = time.monotonic()
        self._arrivals = 0

    def summary(self) -> dict[str, Any]:
        """What ``GET /sessions/{id}`` answers."""
        now = time.monotonic()
        versions = dict.fromkeys(version for turn in self.turns for version in turn.generated.weight_versions)
        return {
            "session_id": self.id,
            "evaluation": self.evaluation,
            "turns": len(self.turns),
            "generated_tokens": sum(len(turn.generated) for turn in self.turns),
            "prompt_tokens": sum(turn.prompt_ids.size for turn in self.turns),
            "prompts": dict(self.prompts),
            "bytes_held": self.nbytes,
            "weight_versions": list(versions),
            "calls_under_way": self.calls,
            "age": now - self.created,
            "idle": 0.0 if self.calls else now - self.used,
        }

    def next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals - 1


class Sessions:
    """All of them, within their limits. One event loop uses it."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._open: dict[str, Session] = {}
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self.nbytes = 0
        self.released = 0  # bytes let go of since somebody set it to 0
        self._prompts: Counter[str] = Counter()

    def summary(self) -> dict[str, Any]:
        """What ``GET /sessions`` answers."""
        return {
            "sessions": len(self._open),
            "calls_under_way": sum(session.calls for session in self._open.values()),
            "bytes_held": self.nbytes,
            "prompts": dict(self._prompts),
            "limits": asdict(self._limits),
        }

    def create(self, *, evaluation: bool) -> Session:
        """A new one.

        Raises:
            SessionError: 429, there are as many as may be.
        """
        if len(self._open) >= self._limits.max_sessions:
            self.expire()
        if len(self._open) >= self._limits.max_sessions:
            raise SessionError(
                f"{len(self._open)} sessions are open and no more are allowed: delete some, or raise {flag('max_sessions')}",
                429,
                "too_many_sessions",
            )
        session = Session(evaluation=evaluation)
        self._open[session.id] = session
        return session

    def get(self, session_id: str) -> Session:
        """The open session of this id.

        Raises:
            SessionError: 404, with the reason if it has ended.
        """
        if session_id in self._open:
            self._expire(self._open[session_id])
        if session_id not in self._open:
            raise self._not_open(session_id)
        return self._open[session_id]

    def end(self, session: Session, reason: str) -> None:
        """Lets go of what it holds; its calls are cancelled by whoever attends them."""
        if self._open.pop(session.id, None) is None:
            return
        self.nbytes -= session.nbytes
        self.released += session.nbytes
        session.turns, session.said, session.nbytes, session.reason = [], {}, 0, reason
        self._reasons[session.id] = reason
        while len(self._reasons) > _REMEMBERED_ENDS:
            self._reasons.popitem(last=False)
        session.ended.set()

    def end_all(self, reason: str) -> None:
        for session in list(self._open.values()):
            self.end(session, reason)

    def expire(self) -> None:
        """Ends those that are too old, or idle for too long."""
        for session in list(self._open.values()):
            self._expire(session)

    @contextmanager
    def call(self, session: Session) -> Iterator[int]:
        """Holds a session in use; gives the call's arrival number.

        Raises:
            SessionError: 404, it has ended; 413 or 429, the session, or all of them together, hold as much as they may.
        """
        self._check_open(session)
        if not session.evaluation:
            self._check_room(session, 1)
        session.calls += 1
        try:
            yield session.next_arrival()
        finally:
            session.calls -= 1
            session.used = time.monotonic()

    def record(self, session: Session, exchange: Exchange) -> None:
        """Keeps a turn.

        Raises:
            SessionError: 404, 413 or 429; the session is as it was.
        """
        turn = exchange.turn
        self._check_open(session)
        self._check_room(session, turn.nbytes)
        bisect.insort(session.turns, turn, key=lambda turn: turn.arrival)
        for prompts in (session.prompts, self._prompts):
            prompts[exchange.prompt.origin] += 1
        if exchange.said is not None:
            session.said[exchange.said] = turn
        session.nbytes += turn.nbytes
        self.nbytes += turn.nbytes

    def _check_open(self, session: Session) -> None:
        if session.ended.is_set():
            raise self._not_open(session.id)

    def _expire(self, session: Session) -> None:
        now, limits = time.monotonic(), self._limits
        if now - session.created > limits.max_age:
            self.end(session, f"it was {limits.max_age:g} s old, the most that {flag('max_age')} allows")
        elif not session.calls and now - session.used > limits.max_idle:
            self.end(session, f"nobody used it for {limits.max_idle:g} s, the most that {flag('max_idle')} allows")

    def _check_room(self, session: Session, added: int) -> None:
        limits = self._limits
        if len(session.turns) >= limits.max_turns:
            what = f"session {session.id} holds {len(session.turns)} turns: open another, or raise {flag('max_turns')}"
            raise SessionError(what, 413, "too_many_turns")
        for held, most, name, status in (
            (session.nbytes, limits.max_session_bytes, "max_session_bytes", 413),
            (self.nbytes, limits.max_total_bytes, "max_total_bytes", 429),
        ):
            if held + added > most:
                whose = f"session {session.id} holds" if name == "max_session_bytes" else "all sessions together hold"
                raise SessionError(
                    f"{whose} {held} bytes and this turn would pass the limit of {most}: fetch and delete what is finished, or "
                    f"raise {flag(name)}",
                    status,
                    "memory_limit",
                )

    def _not_open(self, session_id: str) -> SessionError:
        reason = self._reasons.get(session_id)
        why = f"it has ended: {reason}" if reason else "it never was opened here, or ended long ago"
        return SessionError(f"no session {session_id[:80]}: {why}; POST /sessions opens one", 404, "unknown_session")
