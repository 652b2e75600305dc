"""Real tasks: what is drawn, what is held out, what is rewarded, and what is refused."""

import json
import pickle
import random
import subprocess
import sys

import pytest

from miles_sc.trainer.rewards import answer_rule
from miles_sc.trainer.tasks import load_task, parse_task_options, task_names

ONE_DIGIT_SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 1}


def procedural(task="chain_sum", *, rm_type=None, seed=0, held_out=16, options=None):
    return load_task(task=task, prompt_data=None, rm_type=rm_type, seed=seed, held_out=held_out, task_options=options)


def jsonl(path, *, rm_type="exact", seed=0, held_out=2, **keys):
    return load_task(task=None, prompt_data=str(path), rm_type=rm_type, seed=seed, held_out=held_out, **keys)


@pytest.fixture
def write(tmp_path):
    """``write(records or raw lines) -> path`` of a JSONL file."""

    def write(lines):
        path = tmp_path / "problems.jsonl"
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        return path

    return write


@pytest.fixture
def sums(write):
    return write([{"input": f"{n} + 1 =", "label": n + 1} for n in range(10)])


def test_tasks_import_without_the_task_library():
    code = "import sys, miles_sc.trainer.tasks; sys.exit('reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "list_functions", "base_conversion"])
def test_an_index_is_the_same_problem_in_every_process(name):
    first, second = procedural(name, seed=3), procedural(name, seed=3)
    random.random()
    indices = [0, 1, 499, 500, 12_345]
    assert [first.train(i) for i in indices] == [second.train(i) for i in reversed(indices)][::-1]
    arrived = pickle.loads(pickle.dumps(first))
    assert arrived.train(7) == first.train(7)
    assert arrived.reward(first.train(7), first.train(7).answer) == 1


def test_a_task_leaves_the_global_random_state_alone():
    task = procedural("list_functions")
    random.seed(5)
    expected = random.random()
    random.seed(5)
    task.train(0)
    assert random.random() == expected


def test_seeds_give_other_training_problems_but_the_same_held_out_set():
    first, second = procedural(seed=0), procedural(seed=1)
    assert [first.train(i).prompt for i in range(20)] != [second.train(i).prompt for i in range(20)]
    assert first.held_out() == second.held_out()


def test_no_held_out_prompt_is_ever_trained_on_even_in_a_task_of_200_prompts():
    task = procedural(options=ONE_DIGIT_SUMS, held_out=8)
    held_out = {problem.prompt for problem in task.held_out()}
    assert len(held_out) == 8
    for seed in (0, 1):
        trained = {procedural(options=ONE_DIGIT_SUMS, seed=seed).train(i).prompt for i in range(2000)}
        assert len(trained) > 100
        assert not trained & held_out


def test_more_held_out_problems_than_a_small_task_has_are_refused():
    with pytest.raises(ValueError, match="1000 held-out problems asked, only.*at most"):
        procedural(options=ONE_DIGIT_SUMS, held_out=1000).held_out()


def test_the_data_set_verifies_its_answers():
    task = procedural()
    problem = task.train(0)
    assert task.reward(problem, f"  {problem.answer}.0\n") == 1
    assert task.reward(problem, f"So <answer> {problem.answer} </answer> it is") == 1
    assert task.reward(problem, "no idea") == 0


def test_text_that_a_verifier_cannot_parse_earns_nothing():
    task = procedural("prime_factorization")
    assert task.reward(task.train(0), "( 3") == 0


def test_partial_credit_gives_way_to_a_rule():
    problem = procedural("spell_backward").train(0)
    nearly = problem.answer[:-1] + "?"
    assert 0 < procedural("spell_backward").reward(problem, nearly) < 1
    assert procedural("spell_backward", rm_type="exact").reward(problem, nearly) == 0
    assert procedural("spell_backward", rm_type="exact").reward(problem, f" {problem.answer}") == 1


def test_a_constant_reward_reads_nothing(sums):
    for task in (procedural(rm_type="constant:-1"), jsonl(sums, rm_type="constant:-1")):
        assert {task.reward(task.train(0), text) for text in ("", "1", task.train(0).answer)} == {-1.0}


def test_an_unknown_task_lists_what_was_meant():
    with pytest.raises(ValueError, match="'chainsum'.*did you mean.*chain_sum.*miles-sc tasks"):
        procedural("chainsum")
    assert {"chain_sum", "spell_backward"} <= set(task_names())


def test_task_options_are_checked():
    with pytest.raises(ValueError, match="'max_term'.*max_terms"):
        procedural(options={"max_term": 3})
    with pytest.raises(ValueError, match="'seed'"):
        procedural(options={"seed": 3})
    with pytest.raises(ValueError, match="min_terms must be positive"):
        procedural(options={"min_terms": 0})
    with pytest.raises(ValueError, match="'min_terms': 'two'"):
        procedural(options={"min_terms": "two"})


def test_task_options_are_parsed():
    pairs = ["a=3", "b=0.5", "c=true", "d=False", "e=words.txt", "f=x=y", "g=[1, 2]"]
    assert parse_task_options(pairs) == dict(a=3, b=0.5, c=True, d=False, e="words.txt", f="x=y", g=[1, 2])
    with pytest.raises(ValueError, match="'max_terms' is not key=value"):
        parse_task_options(["max_terms"])
    with pytest.raises(ValueError, match="'a' is given twice"):
        parse_task_options(["a=1", "a=2"])


def test_exactly_one_source_of_problems(sums):
    for both in ({"task": "chain_sum", "prompt_data": str(sums)}, {"task": None, "prompt_data": None}):
        with pytest.raises(ValueError, match="exactly one of --task and --prompt-data"):
            load_task(**both, rm_type="exact", seed=0, held_out=1)
    with pytest.raises(ValueError, match="--task-option max_terms needs --task"):
        jsonl(sums, task_options={"max_terms": 3})
    with pytest.raises(ValueError, match="at least 1 problem, got 0"):
        procedural(held_out=0)
    with pytest.raises(ValueError, match="index must be >= 0, got -1"):
        procedural().train(-1)


def test_a_file_is_cycled_through_in_a_new_order_each_epoch(sums):
    task = jsonl(sums)
    epochs = [[task.train(8 * epoch + i).prompt for i in range(8)] for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert all(set(epoch) == set(epochs[0]) and len(set(epoch)) == 8 for epoch in epochs)
    assert [jsonl(sums).train(i).prompt for i in range(8)] == epochs[0]
    assert [jsonl(sums, seed=1).train(i).prompt for i in range(8)] != epochs[0]


def test_a_files_held_out_prompts_are_not_trained_on(write):
    path = write([{"q": f"word {n % 6}", "a": "x"} for n in range(30)])
    task = jsonl(path, input_key="q", label_key="a")
    held_out = {problem.prompt for problem in task.held_out()}
    assert len(task.held_out()) == 2
    assert not held_out & {task.train(i).prompt for i in range(100)}
    assert jsonl(path, input_key="q", label_key="a", seed=9).held_out() == task.held_out()


def test_a_file_too_small_to_split_is_refused(write):
    path = write([{"input": "same", "label": "x"}] * 5)
    with pytest.raises(ValueError, match="5 lines with 1 distinct prompts.*add lines"):
        jsonl(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a"\n', "line 2: not JSON"),
        ("[1, 2]\n", "line 2: .* is no JSON object"),
        ('{"prompt": "a", "label": "b"}\n', "line 2: no key 'input'.*--input-key"),
        ('{"input": "a"}\n', "line 2: no key 'label'.*--label-key"),
        ('{"input": 3, "label": "b"}\n', "line 2: 'input' must be a non-empty string, got 3"),
        ('{"input": "a", "label": " "}\n', "line 2: 'label' must be"),
        ('{"input": "a", "label": true}\n', "line 2: 'label' must be"),
        ('{"input": "a", "label": null}\n', "line 2: 'label' must be"),
        ("\n", "line 2: blank line; remove it"),
    ],
)
def test_a_malformed_line_is_named(write, line, message):
    path = write([{"input": "good", "label": "b"}, line, {"input": "good too", "label": "b"}])
    with pytest.raises(ValueError, match=message):
        jsonl(path)


def test_files_that_hold_nothing_usable_are_refused(write, tmp_path):
    with pytest.raises(ValueError, match="is empty; write one JSON object"):
        jsonl(write([]))
    with pytest.raises(ValueError, match="absent.jsonl cannot be read"):
        jsonl(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"input": "\xe9", "label": "b"}\n')
    with pytest.raises(ValueError, match="cannot be read.*UTF-8"):
        jsonl(tmp_path / "latin.jsonl")
    with pytest.raises(ValueError, match="needs --rm-type: one of exact, number, contains"):
        jsonl(write([{"input": "a", "label": "b"}]), rm_type=None)
    with pytest.raises(ValueError, match="line 1: reward rule 'number'.*'b'; change the label or --rm-type"):
        jsonl(write([{"input": "a", "label": "b"}]), rm_type="number")


@pytest.mark.parametrize(
    ("rule", "answer", "text", "reward"),
    [
        ("exact", "12", " 12\n", 1),
        ("exact", "12", "12.", 0),
        ("contains", "blue", "It is blue.", 1),
        ("contains", "blue", "It is red.", 0),
        ("number", "1000", "between 5 and 1,000.00", 1),
        ("number", "1000", "1000 or 5", 0),
        ("number", "-4", "so x = -4.", 1),
        ("number", "4", "3-4", 1),
        ("number", "-4", "\u22124", 1),
        ("number", "0.5", ".50", 1),
        ("number", "300", "3e2", 1),
        ("number", "3", "1,2,3", 1),
        ("number", "3", "none", 0),
        ("constant:0.25", "anything", "", 0.25),
    ],
)
def test_rules(rule, answer, text, reward):
    assert answer_rule(rule)(answer, text) == reward


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match="--rm-type 'exakt' is unknown: use one of exact, number, contains"):
        answer_rule("exakt")
    for bad in ("constant:", "constant:much", "constant:nan", "constant:inf"):
        with pytest.raises(ValueError, match="not a finite number"):
            procedural(rm_type=bad)
    with pytest.raises(ValueError, match="'3 or 4'"):
        answer_rule("number")("3 or 4", "3")
