"""Examples and benchmarks run as their users would run them, in small."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

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


def test_a_custom_producer_fills_what_the_trainer_needs(model):
    output = run("examples/custom_producer.py", "--hf-checkpoint", str(model))
    assert re.fullmatch(r"4 samples are ready to train on; the 32 candidates hold 0\.\d{4} of q\n", output)


def test_the_documented_producer_is_the_one_that_runs():
    example, page = (ROOT / "examples/custom_producer.py").read_text(), (ROOT / "docs/custom-producers.md").read_text()
    shown = re.search(r"```python\n(@torch.*?)```", page, re.DOTALL)[1]
    assert shown in example


def test_the_custom_producer_records_what_it_draws_from(model):
    path = ROOT / "examples/custom_producer.py"
    produce = runpy.run_path(str(path))["produce"]
    lm = AutoModelForCausalLM.from_pretrained(model).double().eval()
    sample = produce(lm, [5, 6, 7], k=32, temperature=0.8, length=5, index=0)
    with torch.inference_mode():
        log_q = (lm(torch.tensor([sample.tokens])).logits[0, 2:-1].double() / 0.8).log_softmax(-1)
    ids = torch.from_numpy(sample.rollout_topk_token_ids.astype("int64"))
    torch.testing.assert_close(torch.from_numpy(sample.rollout_topk_log_probs).double(), log_q.gather(1, ids), atol=1e-5, rtol=0)
    sampled = log_q.gather(1, torch.tensor(sample.tokens[3:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sample.rollout_log_probs).double(), sampled, atol=1e-5, rtol=0)
