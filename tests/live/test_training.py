"""``miles-sc train`` as a user calls it, on real SGLang servers."""

import os
import subprocess
import sys

import pytest

from tests.conftest import TRAINED, read_records


@pytest.fixture
def train(base_flags, tmp_path):
    """``train(*flags) -> finished process``; its run is in ``tmp_path / "run"``."""

    def train(*flags):
        command = [sys.executable, "-m", "miles_sc.cli", "train", *base_flags, "--loss-type", "score_centering", *TRAINED]
        command += [
            "--rollout-top-logprobs-num",
            "32",
            "--rollout-engine",
            "sglang",
            "--output-dir",
            str(tmp_path / "run"),
            *flags,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)

    return train


def test_a_run_on_launched_servers_whose_responses_are_stopped_and_continued(sglang_python, train, tmp_path):
    finished = train(
        "--sglang-python", sglang_python, "--sglang-router", "launch", "--update-weights-by", "distributed", "--num-rollout", "3",
        "--rollout-max-response-len", "24", "--max-turns", "3", "--observation", " no: ", "--rollout-mismatch", "none",
        "--over-sampling-batch-size", "12", "--partial-rollout", "--eval-interval", "3", "--lr", "1e-2",
        # every response takes all of its turns and is trained, whichever groups are complete first
        "--rm-type", "constant:0.5", "--disable-rewards-normalization",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    first, *later = read_records(tmp_path / "run")[1:]
    # the server's distribution of the first weights is the trainer's, observations and all
    assert first["train/train_rollout_logprob_abs_diff_max"] < 1e-4 and first["train/sc_sampled_in_head"] > 0.5
    assert all(record["rollout/turns"] > 1 for record in (first, *later))
    assert all(record["train/grad_norm"] > 0 for record in (first, *later))
    # what was stopped keeps the distribution of older weights
    assert later[0]["train/train_rollout_logprob_abs_diff_max"] > 1e-3
    assert (tmp_path / "run/report.html").is_file()


def test_a_route_that_drops_the_support_is_refused_before_anything_is_sampled(server, train, tmp_path):
    finished = train("--rollout-external-engine-addrs", server.url, "--sglang-router", "launch", "--rollout-top-k", "16")
    assert finished.returncode == 1
    assert "support" in finished.stderr and "return_sampling_mask and sampling_logprobs_mode" in finished.stderr
    assert not (tmp_path / "run/metrics.jsonl").exists()
