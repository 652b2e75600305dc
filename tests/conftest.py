"""A very small model and real Ray actors, shared by the tests that train."""

import argparse
import json
from pathlib import Path

import pytest

from miles_sc.trainer.arguments import add_train_arguments, finish_train_arguments
from miles_sc.trainer.cluster import Actors, ray_session
from miles_sc.trainer.driver import StopRequests, train
from miles_sc.trainer.run_directory import RunDirectory
from miles_sc.trainer.tasks import load_task
from miles_sc.trainer.tiny_model import make_tiny_model

TRAINED = ["--calculate-per-token-loss", "--disable-grpo-std-normalization", "--use-rollout-logprobs"]


@pytest.fixture(scope="session")
def sums(tmp_path_factory) -> Path:
    """Prompts and answers: sums of two digits."""
    path = tmp_path_factory.mktemp("task") / "sums.jsonl"
    lines = [json.dumps({"input": f"{a} + {b} =", "label": str(a + b)}) for a in range(10) for b in range(10)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory, sums) -> Path:
    """A model of 20k parameters that has seen a few answers."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    task = load_task(task=None, prompt_data=str(sums), rm_type="exact", seed=0, held_out=10)
    make_tiny_model(
        path, task=task, seed=0, steps=150, batch_size=64, learning_rate=3e-3, hidden_size=32, layers=2, heads=2, vocabulary=280
    )
    return path


@pytest.fixture(scope="session")
def base_flags(model, sums) -> list[str]:
    """A command line without a loss."""
    return [
        "--hf-checkpoint", str(model), "--prompt-data", str(sums), "--rm-type", "contains", "--held-out", "10",
        "--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "4", "--micro-batch-size", "8",
        "--lr", "1e-3", "--eval-interval", "2", "--rollout-mismatch", "noise:0.1", "--num-rollout", "2",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def ray_cluster():
    with ray_session():
        yield


@pytest.fixture(scope="session")
def alone(ray_cluster):
    """One train actor."""
    with Actors(1, overlapping=False) as actors:
        yield actors


@pytest.fixture(scope="session")
def pair(ray_cluster):
    """Two train actors, which share the cores with rollout."""
    with Actors(2, overlapping=True) as actors:
        yield actors


@pytest.fixture
def run(base_flags, tmp_path):
    """``run(actors, *flags, name=...) -> records``; later flags win."""

    def run(actors: Actors, *flags: str, name: str = "run") -> list[dict[str, float]]:
        parser = argparse.ArgumentParser()
        add_train_arguments(parser)
        output = tmp_path / name
        args = parser.parse_args([*base_flags, "--output-dir", str(output), *flags])
        finish_train_arguments(args, parser)
        directory = RunDirectory(output, args, arm=args.loss_type)
        directory.claim()
        train(args, directory, actors, StopRequests(), title=name)
        return read_records(output)

    return run


def read_records(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def without_times(records: list[dict[str, float]]) -> list[dict[str, float]]:
    """What a run computed, apart from how long it took."""
    return [{name: value for name, value in record.items() if not name.startswith("perf/")} for record in records]
