"""The small model: a tokenizer that takes any text, a warm-up that teaches, and a directory that anybody can load."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_sc.trainer.tasks import load_task
from miles_sc.trainer.tiny_model import answer_batch, build_tokenizer, make_tiny_model

SMALL = {"steps": 60, "batch_size": 32, "learning_rate": 1e-2, "hidden_size": 32, "layers": 1, "heads": 2}


@pytest.fixture(scope="module")
def task():
    """Sums of a single term: repeat the number, which a second or two teaches in part."""
    return load_task(
        task="chain_sum",
        prompt_data=None,
        rm_type=None,
        seed=0,
        held_out=16,
        task_options={"min_terms": 1, "max_terms": 1, "max_digits": 3},
    )


@pytest.fixture(scope="module")
def made(task, tmp_path_factory):
    """``(directory, summary, progress calls)`` of one small warm-up."""
    calls = []
    output = tmp_path_factory.mktemp("made") / "deep" / "tiny"
    summary = make_tiny_model(output, task=task, seed=0, **SMALL, progress=lambda *call: calls.append(call))
    return output, summary, calls


def test_the_tokenizer_takes_any_text_and_keeps_digits_apart(made):
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    for text in ("State the answer: 1234 =", "naïve ☃ 日本\n\t  two  spaces", " -12", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("98765")) == 5
    assert tokenizer.encode("12") == tokenizer.encode("12", add_special_tokens=False)
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id} == {0, 1}


def test_the_chat_template_is_the_prompt_itself(made):
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    messages = [{"role": "user", "content": "1 + 1 ="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "1 + 1 ="


def test_the_warm_up_teaches(made):
    _, summary, calls = made
    assert [step for step, _, _ in calls] == list(range(1, 61))
    assert calls[-1][2] < 0.5 * calls[0][2]
    assert summary["held_out_problems"] == 16
    assert 0 <= summary["held_out_greedy_accuracy"] <= summary["held_out_greedy_reward"] <= 1


def test_the_directory_loads_and_tells_its_recipe(made):
    output, summary, _ = made
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(output)) == summary["vocabulary"]
    assert json.loads((output / "miles_sc.json").read_text()) == summary
    assert [path.name for path in output.parent.iterdir()] == ["tiny"]


def test_nothing_is_printed(task, tmp_path, capfd):
    summary = make_tiny_model(tmp_path / "tiny", task=task, seed=0, **SMALL | {"steps": 1})
    assert capfd.readouterr() == ("", "")
    assert summary["task"] == "chain_sum min_terms=1 max_terms=1 max_digits=3"


def test_the_same_seed_gives_the_same_weights(made, task, tmp_path):
    before = torch.get_rng_state()
    make_tiny_model(tmp_path / "again", task=task, seed=0, **SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    make_tiny_model(tmp_path / "other", task=task, seed=1, **SMALL)
    first, again, other = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (made[0], tmp_path / "again", tmp_path / "other")
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_the_loss_sees_answers_only(task):
    problems = [task.train(i) for i in range(4)]
    tokenizer = build_tokenizer([problem.prompt for problem in problems], vocabulary=300)
    batch = answer_batch(tokenizer, problems)
    for problem, ids, labels in zip(problems, batch["input_ids"], batch["labels"], strict=True):
        kept = labels != -100
        assert torch.equal(ids[kept], labels[kept])
        assert tokenizer.decode(labels[kept]) == f" {problem.answer}<|endoftext|>"
        assert tokenizer.decode(ids[: len(tokenizer.encode(problem.prompt))]) == problem.prompt


def test_a_failure_leaves_nothing_behind(task, tmp_path):
    def interrupt(step, steps, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_tiny_model(tmp_path / "tiny", task=task, seed=0, **SMALL, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_requests_that_do_not_fit_are_refused(task, tmp_path):
    with pytest.raises(ValueError, match="exists; remove it"):
        make_tiny_model(tmp_path, task=task, seed=0)
    with pytest.raises(ValueError, match="vocabulary 100 cannot hold"):
        make_tiny_model(tmp_path / "tiny", task=task, seed=0, vocabulary=100)
    with pytest.raises(ValueError, match="hidden size 30 is no multiple of 8"):
        make_tiny_model(tmp_path / "tiny", task=task, seed=0, hidden_size=30)
    with pytest.raises(ValueError, match="warm-up steps must be at least 1, got 0"):
        make_tiny_model(tmp_path / "tiny", task=task, seed=0, steps=0)
    unanswered = load_task(task="rush_hour", prompt_data=None, rm_type=None, seed=0, held_out=1)
    with pytest.raises(ValueError, match="no reference answer"):
        make_tiny_model(tmp_path / "tiny", task=unanswered, seed=0, **SMALL)
    assert not (tmp_path / "tiny").exists()
