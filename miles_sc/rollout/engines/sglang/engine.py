"""SGLang servers behind the `Engine` protocol: launched or found, asked, given new weights, brought back when they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.answer import meta_info_of, sampling_versions
from miles_sc.rollout.engines.sglang.checkpoint import Checkpoint
from miles_sc.rollout.engines.sglang.client import EngineClient, EngineError
from miles_sc.rollout.engines.sglang.connection import Server, connect
from miles_sc.rollout.engines.sglang.router import router_process
from miles_sc.rollout.engines.sglang.server import ServerProcess, server_process
from miles_sc.rollout.engines.sglang.settings import SglangSettings
from miles_sc.rollout.engines.sglang.versions import StaleWeights, VersionBook
from miles_sc.rollout.engines.sglang.weights import BroadcastUpdate, DiskUpdate, State, TensorUpdate, WeightUpdate, paused
from miles_sc.rollout.generate import all_or_none

T = TypeVar("T")
Ask = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]
logger = logging.getLogger(__name__)

_MOST_RESTARTS = 3  # between two updates
_ATTEMPTS = _MOST_RESTARTS + 1  # so that a call on which servers end is told that they do
_NOTICE_SECONDS = 0.5
_ABORT_SECONDS = 0.5


class SglangEngine:
    """Servers that all hold the same weights, seen from one event loop.

    Every answer is checked against the versions that were sent: a server that was restarted serves its first weights, and a call
    that met it is repeated after the newest weights have been sent again. A launched server that ends is started again, at most
    three times between two updates.

    An update may come while calls are under way: they pause and continue under the new weights, on keys and values computed anew,
    and every token keeps the distribution and the version of the weights that sampled it.
    """

    def __init__(self, settings: SglangSettings, checkpoint: Checkpoint, config: ScoreCenteringConfig, log_dir: Path) -> None:
        self._settings, self._checkpoint, self._config, self._log_dir = settings, checkpoint, config, log_dir
        self._processes: list[ServerProcess] = []
        self._servers: list[Server] = []
        self._route: EngineClient | None = None
        self._versions = VersionBook(())
        self._update: WeightUpdate | None = None
        # servers that an update has failed on, and which one: they may hold a mixture
        self._doubtful: dict[str, str] = {}
        self._restarts = self._restarts_before_update = 0
        # of whoever changes weights or processes
        self._lock = asyncio.Lock()
        self._calls: set[asyncio.Future[None]] = set()

    @classmethod
    async def start(
        cls, settings: SglangSettings, *, model_path: str | Path, config: ScoreCenteringConfig, log_dir: Path
    ) -> SglangEngine:
        """Launches the servers, or connects to those that run, and asks each whether it can be trained with.

        Args:
            model_path: a Hugging Face model directory, the launched servers' first weights.
            log_dir: for the output of what is launched, and for weights that go by disk.

        Raises:
            ValueError: a server that does not start, cannot be reached or cannot be trained with, or a K above the vocabulary.
                Nothing that was launched is left running.
        """
        checkpoint = Checkpoint.read(Path(model_path).absolute())
        if checkpoint.vocab_size is not None:
            config.check_vocabulary(checkpoint.vocab_size)
        log_dir.mkdir(parents=True, exist_ok=True)
        engine = cls(settings, checkpoint, config, log_dir)
        try:
            await engine._open()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def generate(self, request: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
        """See `Engine`. With several servers and no router, the one with the fewest calls is asked.

        Raises:
            EngineError: no answer, or none sampled by the weights that the call was to be sampled by.
            ServerFailed: a launched server that ends again and again.
        """
        call = asyncio.get_running_loop().create_future()
        self._calls.add(call)
        try:
            return await self._generate(request, read)
        finally:
            self._calls.discard(call)
            call.set_result(None)

    @property
    def routes(self) -> dict[str, Ask]:
        """Every way that a generation may go, by address: for asking each of them what it delivers."""
        clients = [self._route] if self._route is not None else []
        clients += [server.generations for server in self._servers]
        return {client.url: partial(client.ask, read=dict) for client in clients}

    async def update_weights(self, state: State, version: str) -> None:
        """See `Engine`; calls under way continue under the new weights.

        Args:
            state: whole tensors under their names in the checkpoint. Numpy arrays must not be written to until the next update:
                they are kept, to be sent again to a server that has lost them.
            version: any name but SGLang's ``default``.

        Raises:
            ValueError: weights that do not fit the model; nothing has changed then.
            EngineError: a server that did not take them. Calls are refused until an update has come through.
        """
        async with self._lock:
            update = await self._made_update(state, version)
            try:
                self._versions.announce(version)
                await self._start_ended()
                await self._install(update, self._servers)
            except BaseException:
                update.discard()
                raise
            self._versions.settle(version)
            self._restarts_before_update = self._restarts
            before, self._update = self._update, update
            if before is not None:
                before.discard()

    async def abort(self) -> None:
        """See `Engine`. The calls that were under way have returned afterwards; one that begins meanwhile may be ended too."""
        calls = list(self._calls)
        # again and again: some calls may be on their way to a server
        while calls := [call for call in calls if not call.done()]:
            await asyncio.gather(*(_abort_all(server) for server in self._servers))
            await asyncio.wait(calls, timeout=_ABORT_SECONDS)

    async def close(self) -> None:
        """Stops what was launched and leaves other servers as they are; may be called again."""
        await asyncio.gather(*(server.close() for server in self._servers))
        if self._route is not None:
            await self._route.close()
        await asyncio.gather(*(process.stop() for process in self._processes))
        if self._update is not None:
            self._update.discard()

    async def _open(self) -> None:
        settings = self._settings
        if not settings.external_addresses:
            for index in range(settings.num_engines):
                process = server_process(settings, self._config, self._checkpoint.path, index=index, log_dir=self._log_dir)
                self._processes.append(process)
            await all_or_none(process.start() for process in self._processes)
        launched = [(process.address, process) for process in self._processes]
        for address, process in launched or [(address, None) for address in settings.external_addresses]:
            self._servers.append(await connect(address, settings, self._config, process))
        self._versions = VersionBook(await _held_versions(self._servers))
        route = settings.router_url
        if settings.use_router:
            router = router_process(settings, [server.address for server in self._servers], self._log_dir)
            self._processes.append(router)
            await router.start()
            route = router.address
        if route is not None:
            # a router knows no aborts
            self._route = EngineClient(route, settings.client, abort_urls=[server.address for server in self._servers])

    async def _generate(self, request: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
        self._refuse_mixed_weights()
        oldest = self._versions.current

        def read_checked(answer: Mapping[str, Any]) -> T:
            self._refuse_mixed_weights()
            self._versions.check(sampling_versions(meta_info_of(answer)), oldest)
            return read(answer)

        for _ in range(_ATTEMPTS):
            restarts = self._restarts
            server = min(self._servers, key=lambda server: server.in_flight)
            try:
                with server.busy():
                    return await (self._route or server.generations).ask("/generate", request, read_checked)
            except StaleWeights as error:
                problem: ValueError = error
                await self._send_again(error)
            except EngineError as error:
                problem = error
                refused = error.status is not None and error.status < 500
                if refused or not await self._bring_back(restarts):
                    raise
        raise EngineError(
            f"no answer that can be used in {_ATTEMPTS} attempts, the last time: {problem}; does somebody else update these "
            "servers, or does the router know others?"
        ) from problem

    def _refuse_mixed_weights(self) -> None:
        for address, version in self._doubtful.items():
            raise EngineError(
                f"the update to weight version {version!r} failed on {address}, which may hold a mixture: update again"
            )

    async def _send_again(self, stale: StaleWeights) -> None:
        """Gives the newest weights to servers that have lost them."""
        async with self._lock:
            self._refuse_mixed_weights()
            if self._update is None:
                raise EngineError(f"{stale}; no weights were sent yet that could be sent again: update them first") from stale
            await self._start_ended()
            held = await _held_versions(self._servers)
            behind = [server for server, version in zip(self._servers, held, strict=True) if version != self._update.version]
            if behind:
                logger.warning(
                    "an answer was %s: %s restarted or updated by somebody else; sending version %s again",
                    stale,
                    ", ".join(server.address for server in behind),
                    self._update.version,
                )
                await self._install(self._update, behind)

    async def _bring_back(self, restarts: int) -> bool:
        """Starts again what has ended; whether that has happened, here or elsewhere, since ``restarts`` was counted."""
        # for the supervisor to see it
        await asyncio.sleep(_NOTICE_SECONDS)
        async with self._lock:
            await self._start_ended()
        return self._restarts > restarts

    async def _start_ended(self) -> None:
        for process in self._processes:
            if process.exit_code is None:
                continue
            what = f"ended with exit code {process.exit_code}"
            if self._restarts - self._restarts_before_update >= _MOST_RESTARTS:
                raise process.failure(what, f"processes were started again {_MOST_RESTARTS} times since the last update")
            logger.warning("%s", process.failure(what, "starting it again"))
            self._restarts += 1
            await process.restart()
            servers = [server for server in self._servers if server.process is process]
            if self._update is not None and servers:
                await self._install(self._update, servers)

    async def _install(self, update: WeightUpdate, servers: Sequence[Server]) -> None:
        addresses = [server.address for server in servers]
        async with paused(servers):
            try:
                await update.send(servers)
                held = await _held_versions(servers)
            except BaseException:
                self._doubtful |= dict.fromkeys(addresses, update.version)
                raise
            for address, version in zip(addresses, held, strict=True):
                if version != update.version:
                    self._doubtful[address] = update.version
                    raise EngineError(
                        f"SGLang server {address} reports weight version {version!r} after an update to {update.version!r}: does "
                        "somebody else update it? give every run servers of its own"
                    )
            for address in addresses:
                self._doubtful.pop(address, None)

    async def _made_update(self, state: State, version: str) -> WeightUpdate:
        making = asyncio.ensure_future(asyncio.to_thread(self._new_update, state, version))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            (await making).discard()  # its thread went on, and may have written a checkpoint
            raise

    def _new_update(self, state: State, version: str) -> WeightUpdate:
        state = self._checkpoint.matching(state)
        if self._settings.update_weights_by == "disk":
            return DiskUpdate(state, version, model_path=self._checkpoint.path, folder=self._log_dir)
        return {"distributed": BroadcastUpdate, "tensor": TensorUpdate}[self._settings.update_weights_by](state, version)


async def _held_versions(servers: Sequence[Server]) -> list[str]:
    return await all_or_none(server.weight_version() for server in servers)


async def _abort_all(server: Server) -> None:
    try:
        await server.control.post("/abort_request", {"abort_all": True})
    except EngineError as error:
        # its calls end with an error of their own
        logger.warning("could not abort the calls of %s: %s", server.address, error)
