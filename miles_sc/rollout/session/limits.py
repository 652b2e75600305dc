"""What one session, and all of them together, may take of this machine."""

import argparse
from dataclasses import dataclass, fields

_MIB = 1 << 20


@dataclass(frozen=True)
class SessionLimits:
    """Beyond each of them a call is refused, with the flag that raises it.

    Attributes:
        max_body_bytes: of one request.
        max_sessions: at the same time.
        max_turns: of one session.
        max_session_bytes: recorded arrays of one session.
        max_total_bytes: recorded arrays of all sessions.
        max_age: seconds from a session's creation to its end.
        max_idle: seconds without a call after which a session ends.
    """

    max_body_bytes: int = 32 * _MIB
    max_sessions: int = 4096
    max_turns: int = 1024
    max_session_bytes: int = 1024 * _MIB
    max_total_bytes: int = 8192 * _MIB
    max_age: float = 24 * 3600.0
    max_idle: float = 3600.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not value > 0:
                raise ValueError(f"{flag(limit.name)} {value}: give a number above 0")


_HELP = {
    "max_body_bytes": "largest request",
    "max_sessions": "sessions at the same time",
    "max_turns": "turns of one session",
    "max_session_bytes": "recorded arrays of one session",
    "max_total_bytes": "recorded arrays of all sessions",
    "max_age": "seconds from a session's creation to its end",
    "max_idle": "seconds without a call after which a session ends",
}


def add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    """One flag for every limit."""
    for limit in fields(SessionLimits):
        group.add_argument(
            flag(limit.name),
            type=limit.type,
            default=limit.default,
            metavar="N",
            help=f"{_HELP[limit.name]} (default: %(default)s)",
        )


def limits_from_args(args: argparse.Namespace) -> SessionLimits:
    return SessionLimits(**{limit.name: getattr(args, limit.name) for limit in fields(SessionLimits)})


def flag(name: str) -> str:
    """A limit's name on the command line."""
    return "--" + name.replace("_", "-")
