"""SGLang's router before the servers of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from miles_sc.rollout.engines.sglang.server import Launch, ServerProcess
from miles_sc.rollout.engines.sglang.settings import HOST, SglangSettings

# The engine itself repeats calls and restarts servers; a router that did the same would multiply the calls and keep a restarted
# server out for minutes.
_LEFT_TO_THE_ENGINE = ("--disable-retries", "--disable-circuit-breaker", "--disable-health-check")


def router_process(settings: SglangSettings, servers: Sequence[str], log_dir: Path) -> ServerProcess:
    """A router, not started yet, that spreads calls over ``servers`` (``http://host:port``)."""

    def command(port: int) -> list[str]:
        # an answer may take as long as a call waits for it
        patience = ("--request-timeout-secs", str(int(settings.client.request_timeout) + 1))
        owned = ("--host", HOST, "--port", str(port), "--worker-urls", *servers)
        return [
            sys.executable,
            "-m",
            "sglang_router.launch_router",
            *owned,
            *_LEFT_TO_THE_ENGINE,
            *patience,
        ]

    return ServerProcess(
        Launch(
            name="SGLang router",
            command=command,
            environment=dict(os.environ),
            log=log_dir / "router.log",
            health="/readiness",
            start_timeout=settings.start_timeout,
            stop_timeout=settings.stop_timeout,
        )
    )
