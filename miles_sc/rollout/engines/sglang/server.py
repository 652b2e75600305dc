"""A server process of this machine: its port, its log, its health and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang import supervisor
from miles_sc.rollout.engines.sglang.client import ClientSettings, EngineClient, EngineError
from miles_sc.rollout.engines.sglang.settings import HOST, SglangSettings, server_command, server_environment

logger = logging.getLogger(__name__)

_PORT_ATTEMPTS = 3
_HEALTH_CHECK = ClientSettings(request_timeout=5.0, connect_timeout=5.0, attempts=1)
_POLL_SECONDS = 0.25
_TAIL_LINES, _TAIL_BYTES = 25, 65_536


class ServerFailed(ValueError):
    """A launched process that ended by itself or never got healthy."""


@dataclass(frozen=True)
class Launch:
    """What a server process is made from.

    Attributes:
        name: for messages.
        command: the command line, given the port.
        environment: the whole of it.
        log: the file to which its output is appended.
        health: the path that answers 200 once it can be used.
        start_timeout: seconds until that must be.
        stop_timeout: seconds between the request to end and the kill.
    """

    name: str
    command: Callable[[int], list[str]]
    environment: Mapping[str, str]
    log: Path
    health: str
    start_timeout: float
    stop_timeout: float


class ServerProcess:
    """One server under a supervisor, which ends it and all that it started when this process ends, however that happens.

    It keeps its address when it is started again.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._port: socket.socket | None = None
        self._process: subprocess.Popen | None = None
        self._log_start = 0

    @property
    def address(self) -> str:
        """``http://host:port``, from the first start on."""
        return f"http://{HOST}:{self._port.getsockname()[1]}"

    @property
    def exit_code(self) -> int | None:
        """Of a server that has ended; None while it runs."""
        return self._process.poll()

    async def start(self) -> None:
        """Returns once the server is healthy.

        Raises:
            ServerFailed: it ended, or did not get healthy in time; it has been stopped then. With command line and log.
        """
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self._port = self._port or _reserved_port()
            try:
                return await self.restart()
            except ServerFailed:
                if "address already in use" not in self._output().lower() or attempt == _PORT_ATTEMPTS:
                    raise
                logger.warning(
                    "%s: its port %d was taken meanwhile; trying another", self.launch.name, self._port.getsockname()[1]
                )
                self._port.close()
                self._port = None

    async def restart(self) -> None:
        """`start` at the address that it has."""
        self._spawn()
        try:
            await self._until_healthy()
        except BaseException:
            await self._end()
            raise

    async def stop(self) -> None:
        """Ends the server and everything it started; may be called again."""
        if self._process is not None:
            await self._end()
        if self._port is not None:
            self._port.close()

    def failure(self, what: str, remedy: str) -> ServerFailed:
        """An error about this server with its command line and the end of its output."""
        tail = "\n".join(self._output().splitlines()[-_TAIL_LINES:]) or "(no output)"
        return ServerFailed(
            f"{self.launch.name} {what}; {remedy}\n-- command: {shlex.join(self._command())}\n"
            f"-- the end of {self.launch.log}:\n{tail}"
        )

    def _command(self) -> list[str]:
        return self.launch.command(self._port.getsockname()[1])

    def _spawn(self) -> None:
        launch = self.launch
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        bare_python = (sys.executable, "-I", "-S")
        supervised = [*bare_python, supervisor.__file__, str(os.getpid()), str(launch.stop_timeout), *self._command()]
        # a file and no pipe: children inherit it, and a pipe that nobody reads would stop them
        with launch.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                supervised, env=dict(launch.environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        logger.info("%s starts at %s, log %s", launch.name, self.address, launch.log)

    async def _until_healthy(self) -> None:
        clock, client = asyncio.get_running_loop(), EngineClient(self.address, _HEALTH_CHECK)
        deadline = clock.time() + self.launch.start_timeout
        try:
            while not await self._is_healthy(client):
                if self.exit_code is not None:
                    raise self.failure(f"ended with exit code {self.exit_code} before it was healthy", self._remedy())
                if clock.time() > deadline:
                    raise self.failure(
                        f"was not healthy after {self.launch.start_timeout:g} s",
                        "its output says what it was doing; raise start_timeout if it only needs longer",
                    )
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            await client.close()

    async def _is_healthy(self, client: EngineClient) -> bool:
        try:
            await client.get(self.launch.health)
        except EngineError:
            return False
        return self.exit_code is None

    def _remedy(self) -> str:
        if "No module named" in self._output():
            return f"{self._command()[0]} lacks a package: give an interpreter that has it"
        return "its output says why"

    def _output(self) -> str:
        """The end of what the process has written since it was started last."""
        with self.launch.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read().decode(errors="replace")

    async def _end(self) -> None:
        # the supervisor kills the group when its patience ends
        self._process.terminate()
        while self._process.poll() is None:
            await asyncio.sleep(0.05)


def server_process(
    settings: SglangSettings, config: ScoreCenteringConfig, model_path: Path, *, index: int, log_dir: Path
) -> ServerProcess:
    """SGLang server ``index`` of those to launch, not started yet."""
    return ServerProcess(
        Launch(
            name=f"SGLang server {index}",
            command=lambda port: server_command(settings, config, model_path, port=port, index=index),
            environment=server_environment(settings, os.environ),
            log=log_dir / f"sglang-{index}.log",
            health="/health",
            start_timeout=settings.start_timeout,
            stop_timeout=settings.stop_timeout,
        )
    )


def _reserved_port() -> socket.socket:
    """A free port, kept from others: bound and never listening, it lets a server with SO_REUSEADDR bind it besides."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((HOST, 0))
    return reservation
