"""The command: its flags, what it refuses to start with, and that it stops cleanly."""

import argparse
import json
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from miles_sc.rollout.session.limits import SessionLimits, limits_from_args
from miles_sc.rollout.session.serve import add_serve_session_arguments, serve_session, warn_of_exposure
from tests.rollout.session.serving import wait_until

USER = {"role": "user", "content": "hi"}


def parsed(*flags):
    parser = argparse.ArgumentParser()
    add_serve_session_arguments(parser)
    return parser.parse_args(["--engine-url", "http://127.0.0.1:9", *flags])


def test_every_limit_has_a_flag():
    assert limits_from_args(parsed()) == SessionLimits()
    flags = "--max-body-bytes 1 --max-sessions 2 --max-turns 3 --max-session-bytes 4 --max-total-bytes 5 --max-age 6 --max-idle 7"
    assert limits_from_args(parsed(*flags.split())) == SessionLimits(1, 2, 3, 4, 5, 6.0, 7.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-turns", "0"], "--max-turns 0: give a number above 0"),
        (["--rollout-top-p", "0.9"], "--rollout-top-p 0.9 without --rollout-top-k"),
        (["--rollout-temperature", "0"], "--rollout-temperature 0"),
        (["--engine-connections", "0"], "max_connections = 0"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_before_anything_is_asked(flags, message):
    with pytest.raises(ValueError, match=message):
        serve_session(parsed(*flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rollout-top-logprobs-num", "4"], r"the engine's model \(/nowhere\) is not found on this machine.*set --vocab-size"),
        (["--rollout-top-logprobs-num", "40", "--vocab-size", "30"], "40 exceeds the model's vocabulary of 30"),
    ],
)
def test_the_engines_vocabulary_bounds_k(engine, flags, message):
    with pytest.raises(ValueError, match=message):
        serve_session(parsed("--engine-url", engine.url, *flags))


@pytest.mark.parametrize("described", [{"vocab_size": 30}, {"text_config": {"vocab_size": 30}}])
def test_the_vocabulary_is_read_from_the_engines_model(engine, tmp_path, described):
    (tmp_path / "config.json").write_text(json.dumps(described))
    engine.model_path = str(tmp_path)
    with pytest.raises(ValueError, match="40 exceeds the model's vocabulary of 30"):
        serve_session(parsed("--engine-url", engine.url, "--rollout-top-logprobs-num", "40"))


def test_an_engine_that_drops_the_temperature_is_refused(engine):
    engine.original_log_probs = True
    flags = [
        "--engine-url",
        engine.url,
        "--rollout-top-logprobs-num",
        "16",
        "--vocab-size",
        "300",
        "--rollout-temperature",
        "0.5",
    ]
    with pytest.raises(ValueError, match="chat, temperature: .*SGLANG_RETURN_ORIGINAL_LOGPROB=0"):
        serve_session(parsed(*flags))


def test_an_engine_that_does_not_answer_is_named():
    with pytest.raises(ValueError, match="http://127.0.0.1:9/v1/models.*cannot connect"):
        serve_session(parsed("--vocab-size", "30"))


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_the_command_serves_and_stops_with_a_call_under_way(engine, stop, code):
    flags = ["--engine-url", engine.url, "--port", "0", "--rollout-top-logprobs-num", "4", "--vocab-size", "300"]
    command = [sys.executable, "-m", "miles_sc.cli", "serve-session", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().removeprefix("session server: ").strip()
        engine.held.clear()
        session = httpx.post(f"{url}/sessions").json()["session_id"]
        with httpx.Client() as client:
            request = client.build_request("POST", f"{url}/sessions/{session}/v1/chat/completions", json={"messages": [USER]})
            told = []
            caller = threading.Thread(target=lambda: told.append(client.send(request)))
            caller.start()
            wait_until(lambda: engine.waiting)
            process.send_signal(stop)
            caller.join(10)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == code, errors
    assert told[0].status_code == 404 and "the server stops" in told[0].json()["error"]["message"]
    assert engine.aborted and "Traceback" not in errors


@pytest.mark.parametrize(
    ("host", "key", "warning"),
    [("127.0.0.1", None, None), ("localhost", None, None), ("::1", None, None),
     ("0.0.0.0", None, "anybody who reaches this machine (set --api-key)"), ("example.org", "k", "whoever has the key")],
)  # fmt: skip
def test_an_open_address_is_warned_of(capsys, host, key, warning):
    warn_of_exposure(argparse.Namespace(host=host, api_key=key))
    printed = capsys.readouterr().err
    assert (warning in printed and host in printed) if warning else not printed
