"""Real SGLang servers for tests, each started once.

``MILES_SC_SGLANG_PYTHON`` names an interpreter that has SGLang. ``MILES_SC_LIVE_ENDPOINT`` and ``MILES_SC_LIVE_MODEL`` name a
server that runs and the directory of its model: tests that leave weights alone then use it.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from miles_sc import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.server import server_process
from miles_sc.rollout.engines.sglang.settings import SglangSettings

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class LiveServer:
    """A healthy server, ``http://host:port``, and the directory of its model."""

    url: str
    model: Path


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """An interpreter that has SGLang."""
    python = os.environ.get("MILES_SC_SGLANG_PYTHON") or str(REPOSITORY / ".venv-sglang" / "bin" / "python")
    if not Path(python).is_file():
        pytest.skip(f"no SGLang at {python}: run scripts/setup_sglang_cpu.sh, or set MILES_SC_SGLANG_PYTHON")
    return python


@pytest.fixture(scope="session")
def server(request, tmp_path_factory) -> Iterator[LiveServer]:
    """The session's server; its weights stay as they are."""
    if endpoint := os.environ.get("MILES_SC_LIVE_ENDPOINT"):
        yield LiveServer(endpoint, Path(os.environ["MILES_SC_LIVE_MODEL"]))
        return
    python, model = request.getfixturevalue("sglang_python"), request.getfixturevalue("model")
    with launched_server(python, model, tmp_path_factory.mktemp("server")) as launched:
        yield launched


@contextmanager
def launched_server(python: str, model: Path, log_dir: Path) -> Iterator[LiveServer]:
    process = server_process(
        SglangSettings(python=python, stop_timeout=1), ScoreCenteringConfig(), model, index=0, log_dir=log_dir
    )
    try:
        asyncio.run(process.start())
        yield LiveServer(process.address, model)
    finally:
        asyncio.run(process.stop())


async def slow_down(url: str, *, seconds: float | None) -> None:
    """Makes a server wait before every token, or no longer."""
    async with httpx.AsyncClient(base_url=url) as client:
        (await client.post("/slow_down", json={"forward_sleep_time": seconds})).raise_for_status()
