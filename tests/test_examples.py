"""Examples and benchmarks run as their users would run them, in small."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    finished = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_drift_walk_prints_a_distance_per_arm_and_a_report(model, tmp_path):
    flags = ["--quick", "--hf-checkpoint", str(model), "--task", "spell_backward", "--task-option", "max_word_len=4"]
    output = run("examples/drift_walk.py", *flags, "--num-rollout", "2", "--output-dir", str(tmp_path / "walk"))
    distances = re.findall(r"^(\w+_-1) +(\S+) +(\d\.\d+)", output, re.MULTILINE)
    assert {(setting, arm) for setting, arm, _ in distances} == {
        (setting, arm) for setting in ("unbiased_-1", "noise_-1") for arm in ("policy_loss", "score_centering@128")
    }
    assert all(float(distance) > 0 for _, _, distance in distances)
    assert (tmp_path / "walk/report.html").is_file() and not list(tmp_path.glob("walk/*/*/checkpoints"))


def test_candidate_scoring_benchmark_prints_ratios():
    output = run("benchmarks/candidate_scoring.py", "--rows", "16", "--vocabulary", "2000", "--rounds", "1", "--repeats", "1")
    assert re.search(r"^log_softmax \+ gather +\d+\.\d\dx +1\.00x +\d+\.\d\dx$", output, re.MULTILINE)
    assert re.search(r"^vocab_parallel_cross_entropy +\d+\.\d\dx +\d+\.\d\dx +1\.00x$", output, re.MULTILINE)
    assert re.search(r"^selected_log_probs, in place +\d+\.\d\dx +\d+\.\d\dx +\d+\.\d\dx$", output, re.MULTILINE)
    assert re.search(r"^K 32 -> 128: time \d+\.\d\dx$", output, re.MULTILINE)


def test_linear_scoring_benchmark_prints_ratios():
    small = ("--vocabulary", "600", "--small-vocabulary", "300", "--many-rows", "32", "--rows", "8", "--hidden", "16")
    output = run("benchmarks/linear_scoring.py", *small, "--rounds", "1", "--repeats", "1")
    assert output.count("linear_selected_log_probs") >= 2 and re.search(r"\d+\.\d\dx", output)


def test_step_cost_benchmark_prints_paired_ratios(model):
    flags = ["--hf-checkpoint", str(model), "--task", "spell_backward", "--prompts", "4", "--samples-per-prompt", "2"]
    output = run("benchmarks/step_cost.py", *flags, "--repeats", "2")
    assert len(re.findall(r"^(?:training step|rollout): .* = \d+\.\d+", output, re.MULTILINE)) == 3


def test_the_two_commands_of_the_readme_can_be_run():
    for script in ("scripts/quickstart.sh", "scripts/test.sh", ".ci/run"):
        assert (ROOT / script).stat().st_mode & 0o111, script
