"""New weights on their way to servers: as a checkpoint on disk, by broadcast, or through shared memory."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import pybase64
import torch
import torch.multiprocessing
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from miles_sc.rollout.engines.sglang.client import EngineError
from miles_sc.rollout.engines.sglang.connection import Server
from miles_sc.rollout.generate import all_or_none

State = Mapping[str, np.ndarray | Tensor]

BUCKET_BYTES = 512 << 20
_SHARD_BYTES = 4 << 30
_FILES_BESIDE_WEIGHTS = {".json", ".txt", ".model", ".jinja", ".py"}  # configuration and tokenizer
_JOIN_SECONDS = 60.0


class WeightUpdate(Protocol):
    """One set of weights under one name; it can be sent again to a server that has lost them."""

    version: str

    async def send(self, servers: Sequence[Server]) -> None:
        """Every server holds the weights afterwards, and says so. They must not generate meanwhile."""
        ...

    def discard(self) -> None:
        """Gives back what the weights take."""
        ...


@asynccontextmanager
async def paused(servers: Sequence[Server]) -> AsyncIterator[None]:
    """Servers that do not generate.

    Generations under way continue afterwards, on keys and values computed anew by the weights that are there then, and their
    answers tell which version sampled which token. If the block fails they are aborted: no token may come of mixed weights.
    """
    try:
        await _tell(servers, "/pause_generation", {"mode": "retract"})
        yield
    except BaseException:
        # to those that still listen; the failure itself is what is raised
        for path, body in (("/abort_request", {"abort_all": True}), ("/continue_generation", {})):
            await asyncio.gather(*(server.control.post(path, body) for server in servers), return_exceptions=True)
        raise
    await _tell(servers, "/continue_generation", {})


async def _tell(servers: Sequence[Server], path: str, body: Mapping[str, Any]) -> None:
    await all_or_none(server.control.post(path, body) for server in servers)


class DiskUpdate:
    """A Hugging Face checkpoint in a new directory, which the servers read.

    Args:
        state: whole tensors by their names in the checkpoint; read now, not kept.
        model_path: the model's directory, whose other files the checkpoint gets too.
        folder: where the directory is made.
    """

    def __init__(self, state: State, version: str, *, model_path: Path, folder: Path) -> None:
        self.version = version
        self._directory = Path(tempfile.mkdtemp(prefix="weights-", dir=folder)).absolute()
        try:
            for file in model_path.iterdir():
                if file.is_file() and file.suffix in _FILES_BESIDE_WEIGHTS and not file.name.endswith(".index.json"):
                    shutil.copy(file, self._directory)
            for number, shard in enumerate(_buckets(state, _SHARD_BYTES), start=1):
                save_file(dict(shard), self._directory / f"model-{number:05}.safetensors", metadata={"format": "pt"})
            # a server may run as another user
            self._directory.chmod(0o755)
        except (OSError, SafetensorError) as error:
            self.discard()
            raise ValueError(
                f"{self._directory}: the new weights cannot be written ({error}); make room there, or choose another folder "
                "or another way to update weights"
            ) from error
        except BaseException:
            self.discard()
            raise

    async def send(self, servers: Sequence[Server]) -> None:
        body = {"model_path": str(self._directory), "load_format": "auto", "weight_version": self.version}
        await _tell(servers, "/update_weights_from_disk", body)

    def discard(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


class _HeldUpdate:
    """Weights that are kept in this process until they are discarded.

    Numpy arrays are kept as they are and must not be written to; tensors may be a trainer's live ones and are copied to the CPU.
    """

    def __init__(self, state: State, version: str) -> None:
        self.version = version
        self._state = {name: _copied(value) if isinstance(value, Tensor) else value for name, value in state.items()}

    def discard(self) -> None:
        self._state = {}

    def _parts(self) -> Iterator[tuple[list[tuple[str, Tensor]], dict[str, Any]]]:
        """The weights in buckets, each with what a server must be told beside them."""
        buckets = _buckets(self._state, BUCKET_BYTES)
        bucket = next(buckets)
        for following in buckets:
            yield bucket, {"weight_version": None, "flush_cache": False}
            bucket = following
        yield bucket, {"weight_version": self.version, "flush_cache": True}


class BroadcastUpdate(_HeldUpdate):
    """A broadcast to all ranks of all servers, over a process group of its own that lasts for one update.

    A lasting group would have to be found broken whenever a server is restarted; a new one joins whoever is there.
    """

    async def send(self, servers: Sequence[Server]) -> None:
        async with _broadcast_group(servers) as group, _loading(servers):
            for bucket, told in self._parts():
                body = {
                    "names": [name for name, _ in bucket],
                    "dtypes": [str(value.dtype).removeprefix("torch.") for _, value in bucket],
                    "shapes": [list(value.shape) for _, value in bucket],
                    "group_name": group.name,
                    **told,
                }
                heard = (server.control.post("/update_weights_from_distributed", body) for server in servers)
                await all_or_none([asyncio.to_thread(group.broadcast, [value for _, value in bucket]), *heard])


class TensorUpdate(_HeldUpdate):
    """Shared memory, for servers on this machine."""

    async def send(self, servers: Sequence[Server]) -> None:
        async with _loading(servers):
            for bucket, told in self._parts():
                _check_shared_memory(bucket)
                with _shared_by_name():
                    bodies = [
                        # one pickle for each reader: each releases what its own names
                        {"serialized_named_tensors": [_pickled(bucket) for _ in range(server.tensor_ranks)], **told}
                        for server in servers
                    ]
                await all_or_none(
                    server.control.post("/update_weights_from_tensor", body) for server, body in zip(servers, bodies, strict=True)
                )


@asynccontextmanager
async def _loading(servers: Sequence[Server]) -> AsyncIterator[None]:
    """Servers in the state in which they take weights in parts."""
    try:
        await all_or_none(_begin(server) for server in servers)
        yield
    except BaseException:
        await asyncio.gather(*(_if_known(server, "/end_weight_update") for server in servers), return_exceptions=True)
        raise
    await all_or_none(_if_known(server, "/end_weight_update") for server in servers)


async def _begin(server: Server) -> None:
    try:
        await _if_known(server, "/begin_weight_update")
    except EngineError as error:
        if error.status != 400:
            raise
        # a trainer that was killed in an update has left it in that state
        await _if_known(server, "/end_weight_update")
        await _if_known(server, "/begin_weight_update")


async def _if_known(server: Server, path: str) -> None:
    try:
        await server.control.post(path, {})
    except EngineError as error:
        # an older SGLang is always in that state
        if error.status != 404:
            raise


class _BroadcastGroup:
    """Rank 0 of a process group that has nothing to do with this process's default group, if it has one."""

    def __init__(self, backend: Any, name: str, device: torch.device) -> None:
        self.name = name
        self._backend = backend
        self._device = device

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        moved = [tensor.to(self._device).contiguous() for tensor in tensors]
        for work in [self._backend.broadcast([tensor], options) for tensor in moved]:
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@asynccontextmanager
async def _broadcast_group(servers: Sequence[Server]) -> AsyncIterator[_BroadcastGroup]:
    name, size = f"miles_sc_{uuid.uuid4().hex}", 1 + sum(server.tensor_ranks for server in servers)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    host = _own_address(servers)
    stores = [dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_JOIN_SECONDS))]
    common = {
        "master_address": host,
        "master_port": stores[0].port,
        "world_size": size,
        "group_name": name,
        "backend": "nccl" if device.type == "cuda" else "gloo",
    }
    first_ranks = accumulate([1, *(server.tensor_ranks for server in servers[:-1])])
    calls = [
        server.control.post("/init_weights_update_group", {**common, "rank_offset": first})
        for server, first in zip(servers, first_ranks, strict=True)
    ]
    try:
        backend, *_ = await all_or_none([asyncio.to_thread(_join, stores, name, size, device), *calls])
    finally:
        # a server waits half an hour for one that does not come, unless the store goes: no traceback may hold it
        stores.clear()
    try:
        yield _BroadcastGroup(backend, name, device)
    finally:
        await asyncio.gather(
            *(server.control.post("/destroy_weights_update_group", {"group_name": name}) for server in servers),
            return_exceptions=True,
        )


def _join(stores: list[dist.Store], name: str, size: int, device: torch.device) -> Any:
    """The backend of rank 0, under the keys that torch's own process groups use and SGLang puts its group's name before."""
    store = dist.PrefixStore(f"{device.type}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, stores[0])))
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, 0, size, timedelta(seconds=_JOIN_SECONDS))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_JOIN_SECONDS)
    return dist.ProcessGroupNCCL(store, 0, size, options)


def _own_address(servers: Sequence[Server]) -> str:
    """This machine's address as the servers see it."""
    hosts = [urlsplit(server.address).hostname for server in servers]
    remote = [host for host in hosts if host not in ("127.0.0.1", "localhost", "::1")]
    if not remote:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((remote[0], 9))  # sends nothing
        return probe.getsockname()[0]


def _buckets(state: State, most: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Copies of the state on the CPU, in parts of at most so many bytes each, or of one tensor."""
    bucket, size = [], 0
    for name, value in state.items():
        if bucket and size + value.nbytes > most:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, _copied(value)))
        size += value.nbytes
    if bucket:
        yield bucket


def _copied(value: np.ndarray | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return torch.tensor(value)


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Tensors pickled inside are shared under a name that any process of this machine can open, not by a file descriptor."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    # torch's manager of the names lives as long as a server does, and whoever reads our stderr would wait for it
    os.set_inheritable(2, False)
    try:
        yield
    finally:
        os.set_inheritable(2, True)
        torch.multiprocessing.set_sharing_strategy(before)


def _pickled(bucket: list[tuple[str, Tensor]]) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(bucket)
    return pybase64.b64encode(buffer.getvalue()).decode()


def _check_shared_memory(bucket: list[tuple[str, Tensor]]) -> None:
    memory, needed = Path("/dev/shm"), sum(value.nbytes for _, value in bucket)
    if memory.exists() and (free := shutil.disk_usage(memory).free) < needed:
        raise ValueError(
            f"{memory} has {free >> 20} MiB free and these weights need {needed >> 20} MiB of it at a time: give the container "
            "more shared memory, or set update_weights_by to disk or distributed"
        )
