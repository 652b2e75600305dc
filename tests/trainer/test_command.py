"""``miles-sc train`` as a process: what a user sees when something is wrong, and when they stop it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def start(*flags: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "miles_sc.cli", "train", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def finish(*flags: str) -> tuple[int, str]:
    process = start(*flags)
    _, error = process.communicate(timeout=180)
    return process.returncode, error


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--hf-checkpoint", "no/such/model"], "--hf-checkpoint no/such/model: no Hugging Face model there"),
        (
            ["--loss-type", "score_centering", "--rollout-top-logprobs-num", "9999"],
            "--rollout-top-logprobs-num 9999 exceeds the model's",
        ),
        (["--output-dir", "/dev/null/run"], "--output-dir /dev/null/run: cannot be written"),
        (["--save", "/dev/null/checkpoints"], "/dev/null/"),
    ],
)
def test_bad_input_is_one_line_and_no_trace_on_disk(base_flags, tmp_path, flags, message):
    output = tmp_path / "run"
    code, error = finish(*base_flags, "--output-dir", str(output), *flags)
    lines = [line for line in error.splitlines() if line.startswith("miles-sc: error: ")]
    assert code == 1 and len(lines) == 1 and message in lines[0], error
    assert "Traceback" not in error
    assert not list(output.glob("checkpoints/*")), "half a checkpoint is worse than none"


def test_interrupting_leaves_a_checkpoint_and_no_process(base_flags, tmp_path):
    output = tmp_path / "run"
    process = start(*base_flags, "--num-rollout", "100000", "--output-dir", str(output))
    wait_for_rollouts(process, output, 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C does
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    (checkpoint,) = (output / "checkpoints").iterdir()
    assert checkpoint.name.startswith("step_") and f"continue with --load {output}/checkpoints" in error
    assert processes_mentioning(str(output)) == [] and process_group(process.pid) == []


@pytest.mark.parametrize("after", [0.5, 6.0])
def test_interrupting_a_run_that_is_being_loaded_stops_it_at_once(base_flags, tmp_path, after):
    output = tmp_path / "run"
    process = start(*base_flags, "--num-rollout", "100000", "--output-dir", str(output))
    assert "starting Ray" in process.stdout.readline()
    time.sleep(after)  # Ray starts first, then models are loaded
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error, error
    assert not list(output.glob("metrics.jsonl"))
    deadline = time.monotonic() + 20  # Ray's own processes take their time
    while process_group(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_mentioning(str(output)) == [] and process_group(process.pid) == []


def wait_for_rollouts(process: subprocess.Popen, output: Path, rollouts: int) -> None:
    deadline = time.monotonic() + 120
    metrics = output / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > rollouts):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "no rollout in two minutes"
        time.sleep(0.2)


def processes_mentioning(text: str) -> list[str]:
    return [pid for pid in _pids() if text in _read(f"/proc/{pid}/cmdline")]


def process_group(leader: int) -> list[str]:
    """Processes of a session, dead or alive; Ray's daemons belong to that of the command that started them."""
    return [pid for pid in _pids() if _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[3:4] == [str(leader)]]


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # the process has ended meanwhile
        return ""
