"""The command: help, exit codes and errors in one line. What it would start is replaced, so that no process starts."""

import argparse
import sys
import types
from contextlib import contextmanager

import pytest

from miles_sc import cli
from miles_sc.trainer.arguments import add_train_arguments

TRAIN = "train --hf-checkpoint {model} --num-rollout 2 --rollout-batch-size 4 --task chain_sum --output-dir {out}"


STARTING = "starting Ray and the model's processes (some 10 seconds; a minute on a busy machine)\n"


class Interrupted(Exception):
    pass


@pytest.fixture
def started(monkeypatch):
    """The titles of the runs that were trained; ``started.failure`` is raised by the first, ``started.report`` by the report."""
    log = types.SimpleNamespace(runs=[], failure=None, sessions=[], reports=[])

    @contextmanager
    def ray_session(*_, **__):
        log.sessions.append("open")
        try:
            yield
        finally:
            log.sessions.append("closed")

    @contextmanager
    def actors(*_, **__):
        yield None

    def train(args, directory, *_, title):
        log.runs.append(title)
        if log.failure is not None:
            raise log.failure

    @contextmanager
    def stop_requests():
        yield types.SimpleNamespace(check=lambda message: None)

    def write_report(directory):
        log.reports.append(directory)
        return directory / "report.html"

    for name, contents in {
        "cluster": {"ray_session": ray_session, "Actors": actors},
        "driver": {"Interrupted": Interrupted, "train": train, "stop_requests": stop_requests},
        "report": {"write_report": write_report},
    }.items():
        module = types.ModuleType(f"miles_sc.trainer.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return log


@pytest.fixture
def line(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 64}')
    return TRAIN.format(model=tmp_path / "model", out=tmp_path / "out").split()


def help_of(capsys, *argv):
    with pytest.raises(SystemExit, match="^0$"):
        cli.main([*argv, "--help"])
    return " ".join(capsys.readouterr().out.split())


def test_help_names_every_command(capsys):
    text = help_of(capsys)
    for command, (summary, _, _) in cli._COMMANDS.items():
        assert f"{command} {summary}" in text
    assert {"train", "report"} <= cli._COMMANDS.keys()


def test_help_of_train_is_complete_and_grouped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # argparse would break lines at hyphens
    text = help_of(capsys, "train")
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    for group in parser._action_groups:
        for action in group._group_actions:
            assert text.count(f" {action.option_strings[-1]} ") >= 1, action.dest
            assert " ".join((action.help % {"default": action.default}).split()) in text, action.dest
    places = [
        text.index(f"{title}: ") for title in ("model and task", "rollout", "training", "loss", "score centering", "layout")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("command", [name for name in cli._COMMANDS if name != "train"])
def test_help_of_the_other_commands(capsys, command):
    assert cli._COMMANDS[command][0] in help_of(capsys, command)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "required: --hf-checkpoint"),
        (["train", "--frobnicate"], "required"),
        (["report"], "required: directory"),
        (["doctor"], "one of the arguments --endpoint --host is required"),
        (["serve-session"], "required: --engine-url"),
    ],
)
def test_a_wrong_line_is_argparses_affair(capsys, argv, message):
    with pytest.raises(SystemExit, match="^2$"):
        cli.main(argv)
    assert message in capsys.readouterr().err


def test_a_run_ends_with_its_report(capsys, started, line, tmp_path):
    assert cli.main(line) == 0
    out, err = capsys.readouterr()
    assert out == f"{STARTING}report: {tmp_path / 'out' / 'report.html'}\n" and err == ""
    assert started.runs == ["policy_loss"] and started.sessions == ["open", "closed"]


def test_a_comparison_runs_every_arm_and_reports_once(started, line, tmp_path):
    assert cli.main([*line, "--compare", "tis,score_centering@8", "--compare-seeds", "2"]) == 0
    assert started.runs == [f"{arm}, seed {seed}" for arm in ("tis", "score_centering@8") for seed in (42, 43)]
    assert started.reports == [tmp_path / "out"]


def failing_line(capsys, code, argv):
    assert cli.main(argv) == code
    out, err = capsys.readouterr()
    assert out in ("", STARTING) and err.count("\n") == 1 and err.startswith("miles-sc: ")
    return err.removeprefix("miles-sc: ").rstrip("\n")


REFUSED = [
    (
        "--loss-type score_centering",
        "--loss-type score_centering with --rollout-top-logprobs-num 0: set the number of candidates",
    ),
    (
        "--loss-type score_centering --rollout-top-logprobs-num 65",
        "--rollout-top-logprobs-num 65 exceeds the model's vocabulary of 64",
    ),
    ("--hf-checkpoint nowhere", "--hf-checkpoint nowhere: no Hugging Face model there"),
    ("--custom-config-path nowhere.yaml", "--custom-config-path nowhere.yaml: cannot be read as YAML"),
    ("--compare grpo", "--compare: 'grpo' is no arm"),
    ("--rollout-mismatch int3", "--rollout-mismatch 'int3' is not one of"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_a_refusal_is_one_line_and_starts_nothing(capsys, started, line, tmp_path, flags, message):
    assert failing_line(capsys, 1, [*line, *flags.split()]).startswith(f"error: {message}")
    assert started.sessions == [] and not (tmp_path / "out").exists()


def test_an_illegal_combination_in_yaml_is_one_line(capsys, started, line, tmp_path):
    (tmp_path / "c.yaml").write_text("loss_type: score_centering\nrollout_top_logprobs_num: 8\nuse_tis: true\n")
    error = failing_line(capsys, 1, [*line, "--custom-config-path", str(tmp_path / "c.yaml")])
    assert error.startswith("error: --use-tis (= True) with --loss-type score_centering") and started.runs == []


def test_an_unwritable_output_folder_is_one_line(capsys, started, line, tmp_path):
    (tmp_path / "out").write_text("")
    error = failing_line(capsys, 1, line)
    assert error.startswith(f"error: --output-dir {tmp_path / 'out'}: cannot be written") and started.sessions == []


class FromAWorker(Exception):
    """As Ray hands an actor's exception on."""

    def __init__(self, cause):
        super().__init__("a traceback\nof many\nlines")
        self.cause = cause


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (ValueError("sample 3: reward nan\n  is not finite"), "error: sample 3: reward nan is not finite"),
        (OSError(28, "No space left on device"), "error: [Errno 28] No space left on device"),
        (FromAWorker(ValueError("--lr 1: diverged")), "error: --lr 1: diverged"),
        (FromAWorker(FromAWorker(OSError("disk"))), "error: disk"),
        (KeyError("x"), "error: KeyError: 'x' (MILES_SC_TRACEBACK=1 shows where)"),
        (FromAWorker(RuntimeError("boom")), "error: RuntimeError: boom (MILES_SC_TRACEBACK=1 shows where)"),
        (RuntimeError(), "error: RuntimeError: no message (MILES_SC_TRACEBACK=1 shows where)"),
    ],
)
def test_what_fails_in_a_run_is_told_in_one_line(capsys, started, line, failure, expected):
    started.failure = failure
    assert failing_line(capsys, 1, line) == expected
    assert started.sessions == ["open", "closed"] and started.reports == []


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (
            Interrupted("stopped after rollout 1 of 2; continue with --load x"),
            "stopped after rollout 1 of 2; continue with --load x",
        ),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_an_interrupted_run_exits_with_130(capsys, started, line, failure, expected):
    started.failure = failure
    assert failing_line(capsys, 130, [*line, "--compare", "tis,mis"]) == expected
    assert started.runs == ["tis, seed 42"] and started.sessions == ["open", "closed"] and started.reports == []


def test_a_traceback_comes_on_request(capsys, started, line, monkeypatch):
    monkeypatch.setenv("MILES_SC_TRACEBACK", "1")
    started.failure = RuntimeError("boom")
    assert cli.main(line) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("miles-sc: error: RuntimeError: boom (MILES_SC_TRACEBACK=1 shows where)\n")


def test_report_of_a_directory(capsys, started, tmp_path):
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n" and started.reports == [tmp_path]
