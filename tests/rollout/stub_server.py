"""An engine that answers as it is told, over real sockets: faults from a thread, load from a process of its own.

python tests/rollout/stub_server.py ANSWER_FILE    # every POST is answered by the file's bytes; prints its port
"""

import asyncio
import json
import socket
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reply:
    """An answer. ``missing`` bytes are promised and never come; it is sent after ``delay`` seconds."""

    body: bytes = b"{}"
    status: int = 200
    content_type: str = "application/json"
    missing: int = 0
    delay: float = 0.0


@dataclass(frozen=True)
class Reset:
    """The connection is reset in place of an answer."""


@dataclass(frozen=True)
class Hang:
    """No answer; ends when the caller hangs up."""


Action = Reply | Reset | Hang


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes

    @property
    def body(self) -> dict:
        return json.loads(self.content)


class StubServer:
    """Serves while it is entered.

    Args:
        script: path -> what its calls meet, in order; the last is met by all that follow. Another path answers 404, and
            ``/abort_request`` as SGLang does: 200 and nothing.
        port: 0 finds one.

    Attributes:
        calls: what came, in order.
        most_at_once: calls that were under way at the same time, apart from aborts.
    """

    def __init__(self, script: Mapping[str, Action | Sequence[Action]], *, port: int = 0) -> None:
        self._script = {path: list(met) if isinstance(met, Sequence) else [met] for path, met in script.items()}
        self._script.setdefault("/abort_request", [Reply(b"")])
        self._met: defaultdict[str, int] = defaultdict(int)
        self.port = port
        self.calls: list[Call] = []
        self._under_way = self.most_at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bodies(self, path: str) -> list[dict]:
        """What was asked of one path, in order."""
        return [call.body for call in self.calls if call.path == path]

    def __enter__(self) -> "StubServer":
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=[self.serve()])
        self._thread.start()
        assert self._ready.wait(10), "the stub server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._leave.set)
        self._thread.join()

    async def serve(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._leave.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                call = await _read_call(reader)
                self.calls.append(call)
                counted = call.path != "/abort_request"
                self._under_way += counted
                self.most_at_once = max(self.most_at_once, self._under_way)
                try:
                    await _act(self._action(call.path), reader, writer)
                finally:
                    self._under_way -= counted
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # hung up, or the server ends
        finally:
            writer.close()

    def _action(self, path: str) -> Action:
        if path not in self._script:
            return Reply(b'{"detail":"Not Found"}', 404)
        met = self._script[path]
        self._met[path] += 1
        return met[min(self._met[path], len(met)) - 1]


async def _read_call(reader: asyncio.StreamReader) -> Call:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    method, path, _ = lines[0].split(" ")
    headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines[1:])}
    return Call(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


async def _act(action: Action, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if isinstance(action, Hang):
        await reader.read()
        raise ConnectionResetError
    if isinstance(action, Reset):
        # no orderly end: the peer gets a reset
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        raise ConnectionResetError
    await asyncio.sleep(action.delay)
    head = f"HTTP/1.1 {action.status} Stub\r\nContent-Type: {action.content_type}\r\n"
    writer.write(f"{head}Content-Length: {len(action.body) + action.missing}\r\n\r\n".encode())
    writer.write(action.body)
    await writer.drain()
    if action.missing:
        raise ConnectionResetError


def main() -> None:
    with StubServer({"/generate": Reply(Path(sys.argv[1]).read_bytes())}) as server:
        print(server.port, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
