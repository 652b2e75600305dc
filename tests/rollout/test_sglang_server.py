"""Server processes: what they are started with, how they fail, that none is left behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest
import torch

from miles_sc import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import ClientSettings
from miles_sc.rollout.engines.sglang.router import router_process
from miles_sc.rollout.engines.sglang.server import ServerFailed, server_process
from miles_sc.rollout.engines.sglang.settings import CPU_SERVER_ARGS, SglangSettings, server_command, server_environment
from tests.processes import LINUX, MARK, after_a_while, marked, server_pids, supervisor_pids
from tests.rollout.fakes import behaviour, fake_python

SELECTED = ScoreCenteringConfig(top_logprobs_num=8)


# --- what a server is started with


def command(*server_args, config=SELECTED, index=0, **settings):
    made = SglangSettings(python="py", server_args=server_args, **settings)
    return server_command(made, config, "model", port=7, index=index)


def test_the_command_line_on_a_cpu():
    assert command("--dtype", "bfloat16") == [
        *("py", "-m", "sglang.launch_server", "--model-path", "model", "--host", "127.0.0.1", "--port", "7"),
        *CPU_SERVER_ARGS,
        *("--dtype", "bfloat16"),
    ]


def test_servers_on_gpus_take_them_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command(index=2, gpus_per_engine=4)[-4:] == ["--tp-size", "4", "--base-gpu-id", "8"]
    assert not set(command()) & set(CPU_SERVER_ARGS)
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(SglangSettings(), {})


@pytest.mark.parametrize(
    ("k", "config", "expected"),
    [
        (5000, {"top_k": 4500}, ["--sampling-mask-max-tokens", "5000"]),
        (4096, {"top_k": 64}, []),  # SGLang's own limit does
        (5000, {}, []),
    ],
)
def test_a_server_reports_supports_as_wide_as_are_recorded(k, config, expected):
    config = ScoreCenteringConfig(top_logprobs_num=k, **config)
    assert command(config=config)[len(command()) :] == expected


@pytest.mark.parametrize("flag", ["--port", "--port=1", "--host", "--model-path=x", "--model", "--mod"])
def test_flags_that_are_chosen_here_are_refused(flag):
    with pytest.raises(ValueError, match=f"server_args holds {flag}: .*leave it out"):
        SglangSettings(server_args=("--dtype", "float32", flag, "1"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_engines": 0}, "num_engines = 0: give 1 or more"),
        ({"gpus_per_engine": 0}, "gpus_per_engine = 0: give 1 or more"),
        ({"start_timeout": 0}, "start_timeout = 0: give a number of seconds above 0"),
        ({"update_weights_by": "mail"}, "update_weights_by = 'mail': choose one of disk, distributed, tensor"),
        (
            {"use_router": True, "router_url": "http://a:1"},
            "use_router launches a router and router_url = 'http://a:1' names one",
        ),
        ({"external_addresses": ("a:1",), "server_args": ("--x",)}, "with external_addresses none is launched"),
        ({"external_addresses": ("a:1", "a:1")}, "is there twice"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SglangSettings(**settings)


def test_nothing_overrides_whose_log_probs_are_reported():
    original = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    environment = server_environment(
        SglangSettings(environment={**original, "A": "ours"}), {**original, "A": "inherited", "B": "b"}
    )
    assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
    assert (environment["A"], environment["B"]) == ("ours", "b")
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert server_environment(SglangSettings(), {"SGLANG_USE_CPU_ENGINE": "0"})["SGLANG_USE_CPU_ENGINE"] == "0"


# --- how it starts and fails


@pytest.fixture
def process(tmp_path, monkeypatch):
    """``process(**options)``: a server that is not started yet; it behaves as `fake_sglang` says."""
    monkeypatch.setenv(MARK, str(tmp_path))

    def process(start_timeout=30.0, stop_timeout=5.0, **options):
        settings = SglangSettings(
            python=fake_python(tmp_path),
            environment=behaviour(count=str(tmp_path / "count"), **options),
            start_timeout=start_timeout,
            stop_timeout=stop_timeout,
        )
        return server_process(settings, SELECTED, "model", index=3, log_dir=tmp_path / "logs")

    return process


@pytest.fixture
def left(tmp_path):
    """``left() -> processes`` that this test has started and that do not go away."""
    return lambda: after_a_while(lambda: marked(str(tmp_path)))


def port_of(server):
    return urlsplit(server.address).port


@LINUX
def test_a_server_starts_ends_with_its_children_and_keeps_its_address(process, left, tmp_path):
    async def run():
        server = process(child=True)
        await server.start()
        address = server.address
        assert len(marked(str(tmp_path))) == 3 and server.exit_code is None
        await server.stop()
        await server.stop()
        return address

    assert asyncio.run(run()).startswith("http://127.0.0.1:")
    assert left() == {}
    assert "fake SGLang -m sglang.launch_server --model-path model" in (tmp_path / "logs" / "sglang-3.log").read_text()


@LINUX
def test_a_server_that_does_not_end_is_killed(process, left):
    async def run():
        server = process(stop_timeout=0.5, stubborn=True, child=True)
        await server.start()
        await server.stop()

    asyncio.run(run())
    assert left() == {}


@LINUX
def test_a_server_is_started_again_at_its_address(process, tmp_path):
    async def run():
        server = process()
        await server.start()
        address = server.address
        (pid,) = server_pids(str(tmp_path))
        os.kill(pid, signal.SIGKILL)
        while server.exit_code is None:
            await asyncio.sleep(0.01)
        assert server.exit_code == 128 + signal.SIGKILL
        await server.restart()
        assert server.address == address and server.exit_code is None
        await server.stop()

    asyncio.run(run())


@LINUX
def test_an_early_end_shows_code_command_line_and_log(process, left, tmp_path):
    with pytest.raises(ServerFailed) as failure:
        asyncio.run(process(exit="RuntimeError: no kernel for this machine").start())
    message = str(failure.value)
    assert message.startswith("SGLang server 3 ended with exit code 1 before it was healthy; its output says why\n-- command: ")
    assert "-m sglang.launch_server --model-path model --host 127.0.0.1 --port" in message
    assert f"the end of {tmp_path}/logs/sglang-3.log:\n" in message
    assert message.endswith("RuntimeError: no kernel for this machine")
    assert left() == {}


def test_an_interpreter_without_sglang_is_named(process):
    with pytest.raises(ServerFailed, match="fake_python lacks a package: give an interpreter that has it"):
        asyncio.run(process(exit="fake_python: No module named sglang").start())


def test_an_interpreter_that_is_not_there(tmp_path):
    server = server_process(SglangSettings(python=f"{tmp_path}/none"), SELECTED, "model", index=0, log_dir=tmp_path)
    with pytest.raises(ServerFailed, match="No such file or directory: .*/none"):
        asyncio.run(server.start())


@LINUX
def test_a_server_that_never_gets_healthy_is_stopped(process, left):
    with pytest.raises(ServerFailed, match="was not healthy after 0.7 s; .*raise start_timeout"):
        asyncio.run(process(start_timeout=0.7, deaf=True).start())
    assert left() == {}


@LINUX
def test_a_start_that_is_given_up_leaves_nothing(process, left, tmp_path):
    async def run():
        starting = asyncio.ensure_future(process(deaf=True).start())
        while len(marked(str(tmp_path))) < 2:
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(run())
    assert left() == {}


@pytest.mark.parametrize("collisions", [2, 3])
def test_a_port_that_is_taken_meanwhile_is_given_up(process, tmp_path, caplog, collisions):
    async def run():
        server = process(exit="[Errno 98] error while attempting to bind: address already in use", exits=collisions)
        await server.start()
        await server.stop()

    if collisions == 3:
        with pytest.raises(ServerFailed, match="ended with exit code 1"):
            asyncio.run(run())
    else:
        asyncio.run(run())
    log = (tmp_path / "logs" / "sglang-3.log").read_text()
    ports = [line.split("--port ")[1].split()[0] for line in log.splitlines() if "--port" in line]
    assert len(set(ports)) == len(ports) == 3
    assert sum("was taken meanwhile" in record.getMessage() for record in caplog.records) == 2


def test_the_port_is_kept_from_others_while_the_server_starts(process):
    async def run():
        server = process()
        await server.start()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port_of(server)))
        await server.stop()

    asyncio.run(run())


# --- nobody is left behind

STARTED = """
import asyncio, sys, time
from pathlib import Path
from miles_sc import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.server import server_process
from miles_sc.rollout.engines.sglang.settings import SglangSettings

settings = SglangSettings(python=sys.argv[1], stop_timeout=0.5)
server = server_process(settings, ScoreCenteringConfig(), Path("model"), index=0, log_dir=Path(sys.argv[2]))
asyncio.run(server.start())
print("healthy", flush=True)
time.sleep(1000)
"""


@LINUX
@pytest.mark.parametrize("victim", ["parent", "supervisor"])
def test_a_hard_kill_leaves_no_server(tmp_path, left, victim):
    # SGLang's own children end with it; that of a stand-in is ended by the supervisor
    options = behaviour(stubborn=True, child=victim == "parent")
    with subprocess.Popen(
        [sys.executable, "-c", STARTED, fake_python(tmp_path), str(tmp_path)],
        env={**os.environ, MARK: str(tmp_path), **options},
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout.readline() == b"healthy\n"
        (server,), (supervisor,) = server_pids(str(tmp_path)), supervisor_pids(str(tmp_path))
        os.kill(parent.pid if victim == "parent" else supervisor, signal.SIGKILL)
        while server in marked(str(tmp_path)):
            time.sleep(0.05)
        parent.kill()
    assert left() == {}


# --- the router


def test_the_routers_command_line(tmp_path):
    settings = SglangSettings(use_router=True, client=ClientSettings(request_timeout=99))
    server = router_process(settings, ["http://127.0.0.1:1", "http://127.0.0.1:2"], tmp_path)
    assert server.launch.command(7) == [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", "7"),
        *("--worker-urls", "http://127.0.0.1:1", "http://127.0.0.1:2"),
        *("--disable-retries", "--disable-circuit-breaker", "--disable-health-check", "--request-timeout-secs", "100"),
    ]
