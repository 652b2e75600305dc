"""The doctor at a real server, and at it through the real sglang-router 0.3.2."""

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from miles_sc.doctor import add_doctor_arguments, doctor

SAMPLER = ["--mode", "both", "--rollout-top-logprobs-num", "64", "--rollout-top-k", "16", "--rollout-top-p", "0.9"]
ROUTER_SECONDS = 60


@pytest.fixture(scope="module")
def router(server, tmp_path_factory):
    """Address of a router before the server."""
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", server.url, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(metrics)]
    with (
        open(tmp_path_factory.mktemp("router") / "log", "w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            wait_for_worker(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for_worker(url, process):
    deadline = time.monotonic() + ROUTER_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, "the router ended"
        try:
            with urllib.request.urlopen(f"{url}/readiness", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(f"the router at {url} has no worker after {ROUTER_SECONDS} s")


@pytest.fixture
def visit(capsys):
    """``visit(*flags) -> (exit status, findings by (route, check), engines)``."""

    def visit(*flags):
        parser = argparse.ArgumentParser()
        add_doctor_arguments(parser)
        status = doctor(parser.parse_args([*flags, "--json"]))
        report = json.loads(capsys.readouterr().out)
        return status, {(it["route"], it["check"]): it for it in report["findings"]}, report["engines"]

    return visit


@pytest.mark.parametrize("temperature", ["1.0", "0.6"])
def test_a_real_server_passes_everything(server, visit, temperature):
    status, findings, engines = visit("--endpoint", server.url, "--rollout-temperature", temperature, *SAMPLER)
    assert {place: it["came"] for place, it in findings.items() if it["verdict"] != "ok"} == {}
    assert status == 0 and engines == {}
    assert findings["native", "form"]["came"] == findings["chat", "form"]["came"] == "flat base64"
    for route in ("native", "chat"):
        assert findings[route, "candidates"]["came"] == "64 of 64 on every token"
        assert "log-probs go with 1/T^1.00" in findings[route, "temperature"]["came"]
        assert "log-probs go with 1/T^1.00" in findings[route, "support temperature"]["came"]


def test_the_router_is_told_what_it_breaks(server, router, visit):
    status, findings, engines = visit("--endpoint", router, *SAMPLER)
    assert status == 1
    assert {place: it["verdict"] for place, it in findings.items() if it["verdict"] not in ("ok", "could not tell")} == {
        ("native", "form"): "note",
        ("native", "support"): "fails",
        ("chat", "candidates"): "fails",
        ("chat", "meta_info"): "fails",
        ("chat", "prompt ids"): "fails",
    }
    for place in (("native", "form"), ("native", "support"), ("chat", "meta_info"), ("chat", "prompt ids")):
        assert "the router drops it, the engine asked directly does not" in findings[place]["came"]
    assert "64 refused (status 400, " in findings["chat", "candidates"]["came"]
    assert "20 accepted; the router refuses it" in findings["chat", "candidates"]["came"]
    assert "return_sampling_mask and sampling_logprobs_mode" in findings["native", "support"]["remedy"]
    assert [it["verdict"] for it in engines[server.url]] == ["ok"] * len(engines[server.url])


def test_an_unfiltered_run_on_the_native_route_may_use_the_router(router, visit):
    status, findings, _ = visit("--endpoint", router, "--route", "native", "--rollout-top-logprobs-num", "64")
    assert status == 0
    assert {place: it["verdict"] for place, it in findings.items() if it["verdict"] != "ok"} == {("native", "form"): "note"}
