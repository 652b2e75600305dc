"""Runs a command and takes it down, with everything that it started, when asked to end or when the parent is gone.

Run as a file by a bare interpreter: ``python supervisor.py PARENT PATIENCE COMMAND...``. It stands between a trainer and a server
because a trainer that is killed hard can tell nobody, and because a signal on a parent's death is bound to one of its threads.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

_POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


def main(parent: int, patience: float, command: list[str]) -> int:
    ending = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_the_supervisor())
    while not _ended(child) and not ending and os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    if not _ended(child):
        # it alone: a server ends its own children in order
        os.kill(child.pid, signal.SIGTERM)  # Popen's own would reap a child that has just ended
        deadline = time.monotonic() + patience
        while not _ended(child) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    # not reaped yet, so that the group's number cannot be another's by now
    os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _ended(child: subprocess.Popen) -> bool:
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _die_with_the_supervisor():
    """What the child calls before it becomes the command; for a supervisor that is killed itself."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
