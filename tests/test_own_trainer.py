"""The trainer of one's own as its users run it, and every block, mistake and figure of docs/integrate.md."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import miles_sc
from miles_sc import ScoreCenteringConfig, ScoreCenteringInputs, score_centering_loss, selected_log_probs
from miles_sc.rollout import Sample, append_candidates, configure_request
from tests.distributed.launch import device, launch

ROOT = Path(__file__).parent.parent
EXAMPLE, PAGE = ROOT / "examples/own_trainer.py", (ROOT / "docs/integrate.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COLUMNS = ["reward", "sc_rollout_head_mass", "sc_train_head_mass", "train_rollout_logprob_abs_diff", "train_rollout_kl"]


@pytest.fixture(scope="module")
def example():
    """The example's names once it has trained, with the ids and logits of its last batch."""
    spec = importlib.util.spec_from_file_location("own_trainer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ids, module.logits = ids_of(module.samples), logits_of(module)
    return module


def ids_of(samples):
    """``[T, 1+K]``, put together otherwise than in the example."""
    rows = [
        [token, *row.tolist()]
        for sample in samples
        for token, row in zip(sample.tokens[1:], sample.rollout_topk_token_ids, strict=True)
    ]
    return torch.tensor(rows)


def logits_of(example, samples=None):
    with torch.no_grad():
        return torch.cat([example.policy(torch.tensor(sample.tokens[:-1])) for sample in samples or example.samples])


# --- the example


def test_it_learns_and_shows_the_drift():
    done = subprocess.run([sys.executable, EXAMPLE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    steps = [dict(zip(COLUMNS, map(float, line.split()), strict=True)) for line in lines]
    assert head.split() == COLUMNS and len(steps) == 30
    rewards = [step["reward"] for step in steps]
    assert max(rewards[:3]) < 0.3 and min(rewards[-3:]) > 0.9
    assert all(0.01 < step["train_rollout_logprob_abs_diff"] < 0.1 for step in steps[:10])
    assert all(0.5 < step[name] < 1 for step in steps for name in COLUMNS[1:3])


def test_it_is_short_and_the_page_says_how_short():
    lines = len(EXAMPLE.read_text().splitlines())
    assert lines < 80 and f"makes them in {lines} lines" in " ".join(PAGE.split())


def test_it_imports_nothing_but_the_inner_ring():
    modules, names = set(), {}
    for node in ast.walk(ast.parse(EXAMPLE.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names[node.module] = {alias.name for alias in node.names}
    assert modules == {"copy", "numpy", "torch"} and set(names) == {"torch", "miles_sc", "miles_sc.rollout"}
    assert names["miles_sc"] <= set(miles_sc.__all__) and names["miles_sc.rollout"] <= set(miles_sc.rollout.__all__)


def test_a_sampler_that_is_the_trainer_needs_no_correction(example):
    exact = [example.collect(example.policy, [digit]) for digit in range(example.VOCAB)]
    torch.testing.assert_close(example.score(example.policy, exact).detach(), log_p(example, exact), atol=1e-5, rtol=0)
    recorded = torch.from_numpy(np.concatenate([sample.rollout_topk_log_probs for sample in exact]))
    torch.testing.assert_close(log_p(example, exact)[:, 1:], recorded, atol=1e-5, rtol=0)
    _, metrics = example.loss(example.score(example.policy, exact), exact, torch.ones(len(exact)))
    assert metrics["sc_correction"].abs().max() < 1e-3


def log_p(example, samples):
    return logits_of(example, samples).log_softmax(-1).gather(1, ids_of(samples))


# --- the blocks of the page


def block(text):
    (found,) = [block for block in BLOCKS if text in block]
    return found


def run(source, example, **names):
    scope = {**vars(example), **names}
    exec(source, scope)
    return scope


EXCERPTS = ("def collect(", "def score(", "def loss(")
RUN = ("tensor_group", "linear_selected_log_probs", "support_log_probs", "exact = ", "FiniteGuard")


@pytest.mark.parametrize("text", EXCERPTS)
def test_the_three_calls_are_those_of_the_example(text):
    assert block(text) in EXAMPLE.read_text()


def test_every_other_block_is_run_below():
    assert sorted(map(block, EXCERPTS + RUN)) == sorted(BLOCKS)


def test_scoring_from_hidden_states(example):
    found = run(block("linear_selected_log_probs"), example)["log_p"]
    torch.testing.assert_close(found, log_p(example, example.samples), atol=1e-5, rtol=0)


def tensor_parallel(source, logits, ids, config, vocab):
    local = logits.to(device()).chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    scope = {"local_logits": local, "ids": ids.to(device()), "tensor_group": dist.group.WORLD, "CONFIG": config, "VOCAB": vocab}
    scope["selected_log_probs"] = selected_log_probs
    exec(source, scope)
    return scope["log_p"]


def test_scoring_on_tensor_parallel_ranks(example, tmp_path):
    padded = torch.nn.functional.pad(example.logits, (0, 4))  # to twice 7 columns
    source = block("tensor_group")
    for found in launch(tensor_parallel, 2, tmp_path, source, padded, example.ids, example.CONFIG, example.VOCAB):
        torch.testing.assert_close(found, log_p(example, example.samples), atol=1e-5, rtol=0)


FILTERED = ScoreCenteringConfig(top_logprobs_num=4, top_k=3, top_p=0.9, temperature=2.0)


def filtered_answer(example, request):
    """Three likeliest tokens, of those the fewest that hold 0.9, renormalised."""
    assert request["return_sampling_mask"] and request["sampling_logprobs_mode"] == "support"
    tokens, sampled, masks, log_probs = list(request["input_ids"]), [], [], []
    for _ in range(example.LENGTH):
        with torch.no_grad():
            p, order = (example.policy(torch.tensor(tokens))[-1] / FILTERED.temperature).softmax(-1).topk(FILTERED.top_k)
        kept = p.cumsum(0) - p < FILTERED.top_p * p.sum()
        log_q, support = (p[kept] / p[kept].sum()).log().tolist(), order[kept].tolist()
        tokens.append(support[-1])
        sampled.append([log_q[-1], support[-1], None])
        masks.append(support)
        log_probs.append(log_q)
    names = ("output_token_logprobs", "output_token_sampling_mask", "output_token_sampling_logprobs")
    return {"meta_info": dict(zip(names, (sampled, masks, log_probs), strict=True))}


def test_filtered_sampling(example, monkeypatch):
    monkeypatch.setattr(example, "CONFIG", FILTERED)
    monkeypatch.setattr(example, "generate", filtered_answer)
    samples = [example.collect(example, [digit]) for digit in range(example.VOCAB)]
    ids = ids_of(samples)
    assert len({tuple(row) for row in (ids >= 0).tolist()}) > 1  # supports of several sizes
    names = {
        "logits": logits_of(example, samples),
        "ids": ids,
        "log_q": torch.tensor([sample.rollout_log_probs for sample in samples]).flatten(),
        "candidate_log_q": torch.from_numpy(np.concatenate([sample.rollout_topk_log_probs for sample in samples])),
        "advantages": torch.ones(len(ids)),
        "active": None,
    }
    inputs = run(block("support_log_probs"), example, FILTERED=FILTERED, **names)["inputs"]
    _, metrics = score_centering_loss(inputs)
    assert metrics["train_rollout_logprob_abs_diff"].max() < 1e-5
    assert (metrics["sc_tail_ratio"] == 1).all() and (metrics["sc_train_head_mass"] - 1).abs().max() < 1e-5


def test_the_first_thing_to_try_passes_and_can_fail(example):
    source = block("exact = ")
    run(source, example)
    with pytest.raises(AssertionError):
        run(source, example, collect=lambda _, prompt: example.collect(example.sampler, prompt))


def test_a_guard_looks_once_a_step(example):
    names = {"micro_batches": [inputs_of(example), inputs_of(example)], "active_tokens": 640}
    run(block("FiniteGuard"), example, **names)
    log_p = torch.zeros(320).index_fill(0, torch.tensor([7]), torch.nan)
    names["micro_batches"][1] = inputs_of(example, train_log_probs=log_p)
    with pytest.raises(ValueError, match=r"NaN or \+inf in train_log_probs at row 7 of micro-batch 1"):
        run(block("FiniteGuard"), example, **names)


def inputs_of(example, **other):
    scores = log_p(example, example.samples).requires_grad_()
    values = {
        "train_log_probs": scores[:, 0],
        "train_head_log_probs": scores[:, 1:],
        "rollout_log_probs": scores.detach()[:, 0],
        "rollout_head_log_probs": scores.detach()[:, 1:],
        "head_mask": example.ids[:, 1:] >= 0,
        "advantages": torch.ones(len(example.ids)),
    }
    return ScoreCenteringInputs(**values | other)


# --- the mistakes of the page


def ask(example, **sampling_params):
    configure_request(example.CONFIG, {"input_ids": [3], "sampling_params": sampling_params})


def read(example, change):
    """An answer that something on its way has changed."""
    torch.manual_seed(0)
    request = configure_request(example.CONFIG, {"input_ids": [3], "sampling_params": {"max_new_tokens": 20}})
    meta_info = example.generate(example.sampler, request)["meta_info"]
    change(meta_info)
    append_candidates(Sample(tokens=[3]), meta_info, k=5, vocab_size=example.VOCAB)


def capped(meta_info):
    meta_info["output_top_logprobs"] = [row[:3] for row in meta_info["output_top_logprobs"]]


def merged(meta_info):
    for row in meta_info["output_top_logprobs"]:
        row[4][1] = row[3][1]


def shifted(meta_info):
    rows = meta_info["output_top_logprobs"]
    rows.append(rows.pop(0))


def renormalised(meta_info):
    for row in meta_info["output_top_logprobs"]:
        mass = torch.tensor([entry[0] for entry in row]).logsumexp(0).item()
        row[:] = [[log_q - mass, token, None] for log_q, token, _ in row]


def foreign(meta_info):
    meta_info["output_top_logprobs"][1][4][1] = 10


def diverged(example):
    log_p = torch.zeros(320).index_fill(0, torch.tensor([7]), torch.nan)
    score_centering_loss(inputs_of(example, train_log_probs=log_p))


MISTAKES = {
    "greedy sampling": lambda example: ScoreCenteringConfig(top_logprobs_num=5, temperature=0.0),
    "K beyond the vocabulary": lambda example: ScoreCenteringConfig(top_logprobs_num=11).check_vocabulary(example.VOCAB),
    "a call with its own temperature": lambda example: ask(example, temperature=0.7),
    "a penalty": lambda example: ask(example, repetition_penalty=1.05),
    "an answer to another request": lambda example: read(example, dict.clear),
    "a router that caps candidates": lambda example: read(example, capped),
    "candidates merged by text": lambda example: read(example, merged),
    "rows shifted": lambda example: read(example, shifted),
    "the K renormalised, or of another temperature": lambda example: read(example, renormalised),
    "another tokenizer": lambda example: read(example, foreign),
    "logits `[B, S, V]`": lambda example: selected_log_probs(example.logits.view(80, 4, 10), example.ids),
    "logits of the prompt as well": lambda example: selected_log_probs(example.policy(example.tokens).flatten(0, 1), example.ids),
    "advantages per sample": lambda example: inputs_of(example, advantages=example.advantages),
    "a loss mask of numbers": lambda example: inputs_of(example, active=torch.ones(320, dtype=torch.int64)),
    "a trainer that has diverged": diverged,
}
TOLD = dict(re.findall(r"^\| (.*) \| `(.+)` \|$", PAGE.partition("## Errors")[2].partition("No error")[0], re.MULTILINE))


def test_every_mistake_of_the_page_is_made_below():
    assert set(TOLD) == set(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_reads_as_the_page_says(example, mistake):
    with pytest.raises(ValueError, match=re.escape(TOLD[mistake])):
        MISTAKES[mistake](example)


def metrics_of(example, scores):
    log_q = log_p(example, example.samples)
    inputs = inputs_of(
        example,
        train_log_probs=scores[:, 0],
        train_head_log_probs=scores[:, 1:],
        rollout_log_probs=log_q[:, 0],
        rollout_head_log_probs=log_q[:, 1:],
        head_mask=torch.ones(scores[:, 1:].shape, dtype=torch.bool),
    )
    return score_centering_loss(inputs)[1]


def test_what_the_metrics_alone_show(example):
    """The sampler is the trainer here, so that each of them stands for one mistake."""
    right = metrics_of(example, selected_log_probs(example.logits, example.ids))
    assert right["train_rollout_logprob_abs_diff"].max() < 1e-4

    late = example.policy(example.tokens)[:, 1:].flatten(0, 1)
    assert metrics_of(example, selected_log_probs(late, example.ids))["train_rollout_logprob_abs_diff"].mean() > 1
    warm = metrics_of(example, selected_log_probs(example.logits, example.ids, temperature=1.5))
    assert warm["train_rollout_logprob_abs_diff"].mean() > 0.01

    unused = example.ids.clone()
    unused[:, 5] = -1
    assert metrics_of(example, selected_log_probs(example.logits, unused))["sc_train_head_mass"].min() > 1

    padded = metrics_of(example, selected_log_probs(torch.nn.functional.pad(example.logits, (0, 4)), example.ids))
    assert (padded["sc_train_head_mass"] < padded["sc_rollout_head_mass"]).all()
