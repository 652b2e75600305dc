"""Processes that a test has started, however deep: all that have a variable of its own in their environment."""

from pathlib import Path

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


def running(mark: str, module: str) -> list[int]:
    """Process ids of ``python -m module``."""
    return [pid for pid, arguments in marked(mark).items() if arguments[1:3] == ["-m", module]]
