"""Checkpoints: complete or not there, found again, and refused by another run."""

import json

import numpy as np
import pytest

from miles_sc.trainer.checkpoint import new_checkpoint, newest_checkpoint, save_older_weights

SETTINGS = {"loss_type": "score_centering", "rollout_seed": 42, "task": None, "bf16": False}


def write(root, number, *, settings=SETTINGS, content="state"):
    with new_checkpoint(root, number, settings=settings) as checkpoint:
        checkpoint.backend_directory.mkdir()
        (checkpoint.backend_directory / "shard").write_text(content)
    return root / f"step_{number:06d}"


def test_what_is_written_is_found_again(tmp_path):
    path = write(tmp_path / "deep" / "er", 7)
    found = newest_checkpoint(tmp_path / "deep" / "er", settings=SETTINGS)
    assert (found.directory, found.next_rollout) == (path, 7)
    assert (found.backend_directory / "shard").read_text() == "state"


def test_the_newest_counts_not_the_last_written_nor_the_last_by_name(tmp_path):
    for number in (1000000, 3, 999999):
        write(tmp_path, number)
    assert newest_checkpoint(tmp_path, settings=SETTINGS).next_rollout == 1000000


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("No space left on device")])
def test_an_interrupted_checkpoint_leaves_nothing_behind(tmp_path, error):
    with pytest.raises(type(error) if isinstance(error, OSError) else error):
        with new_checkpoint(tmp_path, 3, settings=SETTINGS) as checkpoint:
            (checkpoint.directory / "half").write_text("a")
            raise error
    assert not list(tmp_path.iterdir())


def test_while_it_is_written_the_previous_one_is_still_whole(tmp_path):
    write(tmp_path, 3, content="old")
    with pytest.raises(OSError, match="full"):
        with new_checkpoint(tmp_path, 3, settings=SETTINGS) as checkpoint:
            assert newest_checkpoint(tmp_path, settings=SETTINGS).directory != checkpoint.directory
            raise OSError("full")
    found = newest_checkpoint(tmp_path, settings=SETTINGS)
    assert (found.backend_directory / "shard").read_text() == "old"


def test_a_repeated_step_replaces_the_old_one(tmp_path):
    write(tmp_path, 3, content="old")
    write(tmp_path, 3, content="new")
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]
    assert (tmp_path / "step_000003" / "backend" / "shard").read_text() == "new"


def test_leftovers_of_a_killed_run_are_no_checkpoint_and_in_nobodys_way(tmp_path):
    (tmp_path / ".step_000005.partial" / "junk").mkdir(parents=True)
    (tmp_path / "step_000009").mkdir()  # without trainer.json
    (tmp_path / "step_latest").mkdir()
    (tmp_path / "step_latest" / "trainer.json").write_text("{}")
    write(tmp_path, 3)
    assert newest_checkpoint(tmp_path, settings=SETTINGS).next_rollout == 3
    path = write(tmp_path, 5)
    assert not (path / "junk").exists()


def test_settings_are_kept_as_they_are(tmp_path):
    path = write(tmp_path, 1)
    assert json.loads((path / "trainer.json").read_text()) == {"next_rollout": 1, "settings": SETTINGS}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_seed": 43}, "--rollout-seed = 42 and this run has 43; continue with the same value, or start a new run"),
        ({"loss_type": "policy_loss"}, "--loss-type = 'score_centering' and this run has 'policy_loss'"),
        ({"task": "chain_sum"}, "--task = None and this run has 'chain_sum'"),
        ({"new_setting": 1}, "--new-setting = None and this run has 1"),
    ],
)
def test_another_runs_checkpoint_is_refused_and_says_why(tmp_path, change, message):
    write(tmp_path, 2)
    with pytest.raises(ValueError, match=f"--load .*step_000002: it was written with {message}"):
        newest_checkpoint(tmp_path, settings=SETTINGS | change)


@pytest.mark.parametrize("exists", [True, False])
def test_no_checkpoint_is_named(tmp_path, exists):
    root = tmp_path if exists else tmp_path / "none"
    with pytest.raises(ValueError, match="--load .*: no checkpoint there; give the directory that --save named, or leave --load"):
        newest_checkpoint(root, settings=SETTINGS)


def test_an_unwritable_root_is_an_error_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write(tmp_path / "file", 1)
    assert (tmp_path / "file").read_text() == ""


def test_older_weights_come_back_to_the_bit(tmp_path):
    weights = {"a": np.array([[1.5, -2.25]], np.float32), "b": np.arange(3, dtype=np.float32)}
    with new_checkpoint(tmp_path, 4, settings=SETTINGS) as checkpoint:
        save_older_weights(checkpoint, 2, weights)
        save_older_weights(checkpoint, 3, {"a": weights["a"] + 1})
    found = newest_checkpoint(tmp_path, settings=SETTINGS)
    back = found.older_weights(2)
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[name], weights[name]) and back[name].dtype == np.float32 for name in weights)
    assert found.older_weights(3)["a"].tolist() == [[2.5, -1.25]]
