"""The report says what the records say: numbers, seeds, gaps, conditions, and errors that help."""

import base64
import re
import sys
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

from miles_sc.trainer import figures, report  # noqa: E402
from miles_sc.trainer.report import write_report  # noqa: E402
from miles_sc.trainer.run_records import read_runs, series_of  # noqa: E402
from tests.trainer.run_files import records, write_drift_run, write_run  # noqa: E402


class _Tables(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tables, self.tags, self.text, self.in_cell = [], [], [], False

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
            self.in_cell = True
        elif tag == "div":
            self.handle_data(" ")

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag not in ("th", "td")

    def handle_data(self, data):
        self.text.append(data)
        if self.in_cell:
            self.tables[-1][-1][-1] += data


def parsed(page):
    parser = _Tables()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


def rows_of(page, kind):
    """The numbers of a kind of run, a mapping of heading to text per row."""
    parser = parsed(page)
    classes = [attributes.get("class", "") for tag, attributes in parser.tags if tag == "table"]
    table = parser.tables[classes.index(f"numbers {kind}")]
    return [dict(zip(table[0], row, strict=True)) for row in table[1:]]


def words(page):
    return " ".join("".join(parsed(page).text).split())


def figure_texts(page):
    """What matplotlib wrote into each figure; it keeps every text as a comment beside its outlines."""
    sources = [attributes["src"] for tag, attributes in parsed(page).tags if tag == "img"]
    svgs = [base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode() for source in sources]
    return [re.findall(r"<!-- (.*?) -->", svg) for svg in svgs]


def test_numbers_are_those_of_the_records(tmp_path):
    for seed, last, kl in ((42, 0.4, 0.02), (43, 0.5, 0.04)):
        rows = records(
            evals={0: (0.2, 0.0), 2: (0.9, 0.9), 4: (last, kl)},
            **{
                "rollout/reward": 0.3,
                "train/sc_train_head_mass": 0.98,
                "train/sc_rollout_head_mass": 0.96,
                "train/sc_ess": 0.75,
                "train/train_rollout_logprob_abs_diff": 0.013,
                "perf/step_seconds": 2.5,
            },
        )
        for row, ratio, speed in zip(rows[1:], (1.0, 1.2, 1.4, 1.6), (10, 1000, 1000, 1200), strict=True):
            row |= {"train/sc_tail_ratio": ratio + (seed - 42), "perf/rollout_tokens_per_second": speed}
        write_run(tmp_path / f"seed{seed}", rows, seed=seed)
    page = write_report(tmp_path)
    assert page == tmp_path / "report.html"
    assert rows_of(page, "reward") == [{
        "Arm": "score_centering",
        "Sampler": "int8",
        "Seeds": "42, 43",
        "Rollouts": "4",
        "Held-out reward, first": "0.200 ± 0.000",
        "Held-out reward, last": "0.450 ± 0.071",
        "KL from start, last": "0.0300 ± 0.01",
        "Tail ratio": "1.800 ± 0.707",
        "Head mass, trainer": "0.9800 ± 0.0000",
        "Head mass, sampler": "0.9600 ± 0.0000",
        "Effective sample share": "0.750 ± 0.000",
        "Tokens/s": "1000 ± 0",
        "Seconds per step": "2.50 ± 0",
    }]  # fmt: skip
    assert "score_centering 0.200 ± 0.000 to 0.450 ± 0.071 (2 seeds)" in words(page)
    assert "differ by 0.013 nats per sampled token" in words(page)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_single_run_may_be_the_directory_itself(tmp_path):
    write_run(tmp_path, records(evals={0: (0.25, 0.0), 4: (0.5, 0.01)}), arm="policy_loss")
    page = write_report(tmp_path)
    (row,) = rows_of(page, "reward")
    assert (row["Held-out reward, first"], row["Held-out reward, last"]) == ("0.250", "0.500")
    assert "policy_loss 0.250 to 0.500 (one seed)" in words(page)
    assert ("a", {"href": "metrics.jsonl"}) in parsed(page).tags


def test_missing_metrics_are_named_and_no_panel_vanishes(tmp_path):
    write_run(tmp_path, records(evals={}, **{"rollout/reward": 0.3}))
    page = write_report(tmp_path)
    (row,) = rows_of(page, "reward")
    missing = ("Held-out reward, first", "KL from start, last", "Tail ratio", "Head mass, trainer", "Tokens/s")
    assert [row[name] for name in missing] == ["–"] * len(missing)
    (texts,) = figure_texts(page)
    assert texts.count("not recorded in this run") == 5
    assert "training, sampler (held-out: not recorded in this run)" in texts
    for title in ("Reward", "Sampler mismatch", "Head mass", "Generation speed"):
        assert title in texts
    assert "No held-out reward was recorded" in words(page)


def test_tail_ratio_of_rollouts_without_a_readable_tail_is_left_out(tmp_path):
    rows = records(evals={}, **{"train/sc_tail_ratio": 1.0, "train/sc_tail_floor_fraction": 1.0})
    rows[0] |= {"train/sc_tail_ratio": 1.5, "train/sc_tail_floor_fraction": 0.25}
    write_run(tmp_path, rows)
    assert rows_of(write_report(tmp_path), "reward")[0]["Tail ratio"] == "1.500"


def test_nan_is_a_gap_and_said_to_be_one(tmp_path):
    rows = records(evals={4: (0.5, 0.01)}, **{"train/sc_ess": 0.5})
    rows[1]["train/sc_ess"] = float("nan")
    write_run(tmp_path, rows)
    page = write_report(tmp_path)
    assert rows_of(page, "reward")[0]["Effective sample share"] == "0.500"
    assert "seed 42 recorded NaN or infinity, left out here: train/sc_ess." in words(page)


def test_runs_are_pooled_over_seeds_only(tmp_path):
    for lr in (1e-4, 2e-4):
        for seed in (1, 2):
            rows = records(evals={4: (lr * 1000 * seed, 0.01)})
            write_run(tmp_path / f"{lr}-{seed}", rows, seed=seed, lr=lr, num_rollout=4)
    rows = rows_of(write_report(tmp_path), "reward")
    assert {row["Arm"]: row["Held-out reward, last"] for row in rows} == {
        "score_centering --lr 0.0001": "0.150 ± 0.071",
        "score_centering --lr 0.0002": "0.300 ± 0.141",
    }


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ({"policy_loss": (0.30, 0.40), "score_centering": (0.35, 0.50)}, "no difference is shown"),
        ({"policy_loss": (0.30, 0.34), "score_centering": (0.35, 0.50)}, "Every seed of score_centering ends above"),
        ({"policy_loss": (0.50, 0.60), "score_centering": (0.20, 0.30)}, "Every seed of policy_loss ends above"),
        ({"policy_loss": (0.30,), "score_centering": (0.50,)}, "cannot be told from chance"),
    ],
)
def test_summary_claims_no_more_than_the_seeds_show(tmp_path, ends, said):
    for arm, rewards in ends.items():
        for seed, reward in enumerate(rewards):
            write_run(tmp_path / f"{arm}{seed}", records(evals={4: (reward, 0.1)}), arm=arm, seed=seed)
    assert said in words(write_report(tmp_path))


def test_near_on_policy_and_staleness_are_told_as_they_are(tmp_path):
    difference = {"train/train_rollout_logprob_abs_diff": 1e-5}
    write_run(tmp_path, records(evals={}, **difference), rollout_mismatch="none", rollout_staleness=2)
    page = write_report(tmp_path)
    assert "score centering has next to nothing to subtract" in words(page)
    assert "does not cure staleness" in words(page)
    assert rows_of(page, "reward")[0]["Sampler"] == "2 updates stale"


def test_interrupted_runs_are_pointed_out(tmp_path):
    write_run(tmp_path / "a", records(evals={}, rollouts=2), rollouts=4)
    write_run(tmp_path / "b", [], seed=43)
    page = write_report(tmp_path)
    assert "score_centering, seed 42 recorded 2 of 4 rollouts" in words(page)
    assert "score_centering, seed 43 recorded 0 of 4 rollouts" in words(page)
    assert rows_of(page, "reward")[0]["Rollouts"] == "2 of 4"


def test_drift_panels_part_signs_and_samplers(tmp_path):
    number = 0
    for reward in ("constant:1", "constant:-1"):
        for mismatch, staleness in (("none", 0), ("int8", 0), ("int8", 3)):
            for arm, kl in (("policy_loss", 0.08), ("score_centering", 0.002)):
                number += 1
                where = tmp_path / f"run{number}"
                scale = 0.01 if mismatch == "none" else 1 + staleness
                sampler = {"rollout_mismatch": mismatch, "rollout_staleness": staleness}
                write_drift_run(where, kl=kl * scale, reward=reward, arm=arm, **sampler)
    page = write_report(tmp_path)
    (texts,) = figure_texts(page)
    assert figures.DRIFT_TITLE in texts and "the right answer is the noise floor" in figures.DRIFT_TITLE
    titles = [text for text in texts if text.startswith("reward ")]
    samplers = ("unbiased", "int8", "int8, 3 updates stale")
    assert titles == [f"reward {sign}1, sampler: {sampler}" for sign in "+−" for sampler in samplers]
    assert "same arm, unbiased sampler" in texts
    rows = rows_of(page, "drift")
    assert len(rows) == 12 and not any(name.startswith("Held-out") for name in rows[0])
    found = {(row["Arm"], row["Reward"], row["Sampler"]): row["KL from start, last"] for row in rows}
    assert found["policy_loss", "+1", "int8"] == "0.0800"
    assert found["score_centering", "-1", "int8, 3 updates stale"] == "0.00800"
    said = words(page)
    assert "with a sampler that differs, at policy_loss 0.08 to 0.32, score_centering 0.002 to 0.008" in said
    assert "the noise floor, at policy_loss 0.0008, score_centering 2e-05" in said


def test_reward_and_drift_runs_share_a_page_and_their_colours(tmp_path):
    write_run(tmp_path / "task" / "other", records(evals={4: (0.5, 0.1)}), arm="another")
    write_run(tmp_path / "task" / "sc", records(evals={4: (0.5, 0.1)}))
    write_drift_run(tmp_path / "drift", kl=0.01)
    page = write_report(tmp_path)
    assert len(figure_texts(page)) == 2
    assert len(rows_of(page, "reward")) == 2 and len(rows_of(page, "drift")) == 1
    every = series_of(read_runs(tmp_path))
    alone = series_of(read_runs(tmp_path / "drift"))
    assert figures.looks(every)["score_centering"] == figures.looks(alone)["score_centering"]


def test_no_two_arms_look_alike(tmp_path):
    for number in range(12):
        write_run(tmp_path / str(number), records(evals={4: (0.5, 0.1)}), arm=f"score_centering@{number}")
    looks = figures.looks(series_of(read_runs(tmp_path)))
    assert len(set(looks.values())) == 12


def test_arms_stand_in_the_order_in_which_people_compare(tmp_path):
    arms = ["policy_loss", "tis", "score_centering", "score_centering@8", "score_centering@16", "other"]
    for number, arm in enumerate(reversed(arms)):
        write_run(tmp_path / str(number), records(evals={4: (0.5, 0.1)}), arm=arm)
    assert [row["Arm"] for row in rows_of(write_report(tmp_path), "reward")] == arms


def test_hostile_names_stay_text(tmp_path):
    arm = "<script>alert('x')</script> $\\frac{ & \"_"
    write_run(tmp_path / "a'><b", records(evals={4: (0.5, 0.1)}), arm=arm, task="<img src=x onerror=alert(1)>")
    page = write_report(tmp_path)
    tags = parsed(page).tags
    assert not [tag for tag, _ in tags if tag in ("script", "b")]
    assert all("onerror" not in attributes for _, attributes in tags)
    assert rows_of(page, "reward")[0]["Arm"] == arm
    assert ("a", {"href": "a%27%3E%3Cb/metrics.jsonl"}) in tags


def test_the_page_needs_nothing_from_outside(tmp_path):
    write_run(tmp_path, records(evals={4: (0.5, 0.1)}))
    page = write_report(tmp_path)
    for tag, attributes in parsed(page).tags:
        assert tag not in ("link", "script", "iframe", "object")
        assert attributes.get("src", "data:").startswith("data:")
    assert "url(" not in page.read_text() and "@import" not in page.read_text()


def test_settings_say_whose_they_are(tmp_path):
    write_run(tmp_path / "a", records(evals={}), arm="policy_loss", lr=1e-4, use_tis=False)
    write_run(tmp_path / "b", records(evals={}), arm="tis", lr=1e-4, use_tis=True)
    page = write_report(tmp_path)
    settings = {row[0]: row[1] for table in parsed(page).tables[1:] for row in table}
    assert settings["--use-tis"].split() == ["off", "policy_loss", "on", "tis"]
    assert settings["--lr"] == "0.0001" and settings["--rm-type"] == "not set"
    assert "--output-dir" not in settings


@pytest.mark.parametrize("call", ["main_png", "reward_svg"])
def test_a_failure_while_drawing_leaves_the_old_report(tmp_path, monkeypatch, call):
    write_run(tmp_path, records(evals={4: (0.5, 0.1)}))
    write_report(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(series):
        raise RuntimeError("no ink")

    monkeypatch.setattr(report, call, fail)
    with pytest.raises(RuntimeError, match="no ink"):
        write_report(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_leaves_the_old_report_and_no_litter(tmp_path, monkeypatch):
    write_run(tmp_path, records(evals={4: (0.5, 0.1)}))
    write_report(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    written = []

    def write_bytes(path, content):
        written.append(path)
        if len(written) == 2:
            path.touch()
            raise OSError(28, "No space left on device")
        with path.open("wb") as file:
            file.write(content)

    monkeypatch.setattr(type(tmp_path), "write_bytes", write_bytes)
    with pytest.raises(ValueError, match=r"the report cannot be written \(No space left on device\)"):
        write_report(tmp_path)
    assert len(written) == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    write_run(tmp_path, records(evals={4: (0.5, 0.1)}))
    for name in [name for name in sys.modules if name == "matplotlib" or name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'miles-sc\[report\]'"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_importing_the_report_does_not_import_matplotlib():
    import subprocess

    check = "import sys, miles_sc.trainer.report; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
