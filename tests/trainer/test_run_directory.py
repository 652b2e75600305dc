"""What a run leaves behind."""

import argparse
import json
import sys

import pytest

from miles_sc.trainer.run_directory import RunDirectory


def arguments(**values):
    defaults = {"use_tensorboard": False, "rm_type": None, "rollout_seed": 5, "num_rollout": 3}
    return argparse.Namespace(**{**defaults, "load": None, "save": None, "save_hf": None, "overwrite": False, **values})


def run_directory(path, **values):
    return RunDirectory(path, arguments(**values), arm="score_centering+tis")


def records(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("rm_type", "kind"), [(None, "reward"), ("exact", "reward"), ("constant:-1", "drift"), ("constant:1", "drift")]
)
def test_run_json_says_what_ran(tmp_path, rm_type, kind):
    run_directory(tmp_path / "new" / "run", rm_type=rm_type).claim()
    run_directory(tmp_path / "new" / "run", rm_type=rm_type).start(0)
    assert json.loads((tmp_path / "new" / "run" / "run.json").read_text()) == {
        "arm": "score_centering+tis",
        "seed": 5,
        "kind": kind,
        "rollouts": 3,
        "args": vars(arguments(rm_type=rm_type)),
    }
    assert records(tmp_path / "new" / "run") == []


def test_each_record_is_on_the_disk_when_it_returns(tmp_path):
    directory = run_directory(tmp_path)
    directory.start(0)
    for number in (-1, 0, 1):
        directory.record(number, {"train/loss": number + 0.5, "eval/reward": 0.25})
        assert records(tmp_path)[-1] == {"step": number, "train/loss": number + 0.5, "eval/reward": 0.25}
    assert [record["step"] for record in records(tmp_path)] == [-1, 0, 1]


def written(tmp_path, *steps, tail=""):
    directory = run_directory(tmp_path)
    directory.start(0)
    for step in steps:
        directory.record(step, {"x": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)


@pytest.mark.parametrize("tail", ["", '{"step": 4, "x": 4', '{"st'])
def test_a_continued_run_keeps_what_it_will_not_repeat(tmp_path, tail):
    """A killed run may have recorded rollouts beyond its last checkpoint, and half of one."""
    written(tmp_path, -1, 0, 1, 2, 3, tail=tail)
    directory = run_directory(tmp_path)
    directory.start(2)
    assert [record["step"] for record in records(tmp_path)] == [-1, 0, 1]
    directory.record(2, {"x": 9.0})
    assert records(tmp_path)[-1] == {"step": 2, "x": 9.0}


def test_a_new_run_starts_with_an_empty_record(tmp_path):
    written(tmp_path, 0, 1)
    run_directory(tmp_path).start(0)
    assert records(tmp_path) == []


def test_a_continued_run_may_write_elsewhere(tmp_path):
    run_directory(tmp_path).start(2)
    assert records(tmp_path) == []


@pytest.mark.parametrize("below", ["", "sub/folder"])
def test_an_unwritable_folder_is_named(tmp_path, below):
    (tmp_path / "file").write_text("keep")
    path = tmp_path / "file" / below
    with pytest.raises(ValueError, match="--output-dir .*file.*: cannot be written .*; give a folder that can"):
        run_directory(path).claim()
    assert (tmp_path / "file").read_text() == "keep"


def test_the_check_leaves_no_file(tmp_path):
    run_directory(tmp_path / "run").claim()
    assert not list((tmp_path / "run").iterdir())


def test_nothing_half_written_is_left(tmp_path):
    written(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "run.json"]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    directory = run_directory(tmp_path, use_tensorboard=True)
    directory.start(0)
    for number in (-1, 0, 1):
        directory.record(number, {"train/loss": 0.5 * number})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(0, -0.5), (1, 0.0), (2, 0.5)]


def test_missing_tensorboard_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"--use-tensorboard: tensorboard is not installed; pip install 'miles-sc\[report\]'"):
        run_directory(tmp_path, use_tensorboard=True).start(0)


def test_a_new_run_does_not_mix_with_another(tmp_path):
    (tmp_path / "checkpoints/step_000009").mkdir(parents=True)
    (tmp_path / "checkpoints/step_000009/trainer.json").write_text("{}")
    with pytest.raises(ValueError, match="belongs to another run.*--load.*--overwrite"):
        run_directory(tmp_path).claim()
    run_directory(tmp_path, load=str(tmp_path / "checkpoints")).claim()
    assert (tmp_path / "checkpoints/step_000009").exists()
    # its checkpoint is newer than any of the new run's first ones, and --load would take it
    run_directory(tmp_path, overwrite=True).claim()
    assert (tmp_path / "checkpoints/step_000009").exists(), "the new run may still turn out to be impossible"
    run_directory(tmp_path, overwrite=True).start(0)
    assert not (tmp_path / "checkpoints/step_000009").exists()
    with pytest.raises(ValueError, match="metrics.jsonl belongs to another run"):
        run_directory(tmp_path).claim()


def test_overwriting_spares_a_checkpoint_folder_of_the_users_own(tmp_path):
    (tmp_path / "mine/step_000009").mkdir(parents=True)
    (tmp_path / "mine/step_000009/trainer.json").write_text("{}")
    with pytest.raises(ValueError, match="step_000009 belongs to another run"):
        run_directory(tmp_path / "run", save=str(tmp_path / "mine"), overwrite=True).claim()


def test_continuing_from_elsewhere_does_not_mix_either(tmp_path):
    written(tmp_path, 0)
    with pytest.raises(ValueError, match="belongs to another run"):
        run_directory(tmp_path, load=str(tmp_path / "elsewhere/checkpoints")).claim()


def test_a_model_is_never_written_over_something(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="precious exists already"):
        run_directory(tmp_path / "run", save_hf=str(tmp_path / "precious")).claim()
    assert (tmp_path / "precious/thesis.txt").read_text() == "all of it"


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    written(tmp_path, 0)
    before = (tmp_path / "metrics.jsonl").read_text()
    real = json.dumps

    def half_written(value, **options):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(real(value)[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dumps", half_written)
    with pytest.raises(OSError, match="No space left"):
        run_directory(tmp_path).record(1, {"x": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == before
