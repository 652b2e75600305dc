"""Runs are read back as they were recorded, and what cannot be read is named with its remedy."""

import json

import pytest

from miles_sc.trainer.run_records import read_runs, series_of
from tests.trainer.run_files import records, write_run


def test_band_reaches_from_lowest_to_highest_seed(tmp_path):
    for seed, reward in ((1, 0.1), (2, 0.2), (3, 0.6)):
        write_run(tmp_path / str(seed), records(evals={0: (0.1, 0.0), 4: (reward, 0.1)}), seed=seed)
    (series,) = series_of(read_runs(tmp_path))
    band = series.band("eval/reward")
    assert band.rollouts.tolist() == [0, 4]
    assert band.mean.tolist() == pytest.approx([0.1, 0.3])
    assert (band.low.tolist(), band.high.tolist()) == ([0.1, 0.1], [0.1, 0.6])


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"no run there or below .*give the --output-dir"):
        read_runs(tmp_path)
    with pytest.raises(ValueError, match="no run there or below"):
        read_runs(tmp_path / "absent")
    write_run(tmp_path, [])
    with pytest.raises(ValueError, match="no rollout is recorded yet"):
        read_runs(tmp_path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": 1, "rollout/rew', "Unterminated string"),
        ("", "Expecting value"),
        ("[1]", "it holds no object with a whole-numbered step"),
        ('{"rollout/reward": 1}', "it holds no object with a whole-numbered step"),
        ('{"step": 1, "rollout/reward": "high"}', "rollout/reward is 'high', not a number"),
        ('{"step": 1, "rollout/reward": null}', "rollout/reward is None, not a number"),
        ('{"step": 0}', "step 0 is there twice"),
    ],
)
def test_a_broken_record_is_named_with_file_line_and_remedy(tmp_path, line, reason):
    write_run(tmp_path / "arm", [{"step": 0}])
    path = tmp_path / "arm" / "metrics.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="remove that line, or run it again") as error:
        read_runs(tmp_path)
    assert str(error.value).startswith(f"{path} line 2: no record of a rollout ({reason}")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arm": None}, "no 'arm' of type str"),
        ({"args": []}, "no 'args' of type dict"),
        ({"kind": "other"}, "neither 'reward' nor 'drift'"),
        ({"kind": "drift"}, "rm_type or rollout_staleness is no number"),
    ],
)
def test_a_broken_description_is_named_with_its_remedy(tmp_path, change, reason):
    write_run(tmp_path, records(evals={}))
    path = tmp_path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="run it again, or move") as error:
        read_runs(tmp_path)
    assert str(path) in str(error.value) and reason in str(error.value)


def test_unreadable_json_of_a_description_names_its_line(tmp_path):
    write_run(tmp_path, records(evals={}))
    (tmp_path / "run.json").write_text('{\n  "arm": \n}')
    with pytest.raises(ValueError, match=r"run\.json line 3: cannot be read"):
        read_runs(tmp_path)


def test_a_missing_metrics_file_is_an_error(tmp_path):
    write_run(tmp_path, records(evals={}))
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot be read \(No such file"):
        read_runs(tmp_path)
