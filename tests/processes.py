"""Processes that a test has started, however deep: those with a variable of its own in their environment, those of a session."""

import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
MARK = "MILES_SC_TEST_MARK"


def marked(mark: str) -> dict[int, list[str]]:
    """Command lines by process id."""
    found, wanted = {}, f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                arguments = (folder / "cmdline").read_bytes().decode().split("\0")
                if arguments != [""]:  # one that has ended and is not reaped
                    found[int(folder.name)] = arguments
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or another user's
    return found


def in_sessions(leaders: Collection[int]) -> list[int]:
    """What is left of sessions; a launched server leads one, and its schedulers, which wipe out their environment, are in it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) in leaders and state != "Z":
            found.append(int(folder.name))
    return found


def after_a_while(find: Callable[[], Collection], seconds: float = 20.0) -> Collection:
    """What ``find`` still finds, once it finds nothing or when the time is over: what was killed takes a moment to go."""
    deadline = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def server_pids(mark: str) -> list[int]:
    """Launched servers, the real one or a stand-in."""
    return [
        pid for pid, arguments in marked(mark).items() if "sglang.launch_server" in arguments and not _is_supervisor(arguments)
    ]


def supervisor_pids(mark: str) -> list[int]:
    """What stands between them and us."""
    return [pid for pid, arguments in marked(mark).items() if _is_supervisor(arguments)]


def _is_supervisor(arguments: list[str]) -> bool:
    return any(argument.endswith("supervisor.py") for argument in arguments)
