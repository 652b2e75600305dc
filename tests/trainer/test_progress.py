"""What a user sees while training: plain lines in a pipe, a live table on a terminal."""

import io
import math

import pytest

pytest.importorskip("rich")

from rich.console import Console  # noqa: E402

from miles_sc.trainer import progress as module  # noqa: E402
from miles_sc.trainer.progress import Progress, sparkline  # noqa: E402

FULL = {
    "step": 4,
    "rollout/reward": 0.4321,
    "eval/reward": 0.5,
    "eval/kl_from_start": 0.00123,
    "train/sc_tail_ratio": 1.0345,
    "train/sc_tail_floor_fraction": 0.25,
    "train/sc_train_head_mass": 0.98149,
    "train/sc_rollout_head_mass": 0.97812,
    "train/train_rollout_logprob_abs_diff": 0.0123,
    "perf/rollout_tokens_per_second": 2310.4,
    "perf/step_seconds": 3.217,
}


class Flushes(io.StringIO):
    flushes = 0

    def flush(self):
        self.flushes += 1


def plain(records, *, notes=(), total=12):
    file = Flushes()
    with Progress(total, title="tis, seed 42", console=Console(file=file, width=200)) as progress:
        for record in records:
            before = file.flushes
            progress.update(record)
            assert file.flushes > before
        for note in notes:
            progress.note(note)
    return file.getvalue().splitlines()


def terminal(records, *, width=120, **settings):
    """What stands on the screen at the end, and everything that was written to get there."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None, **settings)
    with Progress(12, title="tis, seed 42", console=console) as progress:
        for record in records:
            progress.update(record)
        progress.note("checkpoint of 5 rollouts in [runs]/a")
    # the last frame follows the erasure of the one before
    frame = file.getvalue().rpartition("\x1b[2K")[2].removesuffix("\n\x1b[?25h")
    return frame, file.getvalue()


def test_a_line_per_rollout_when_piped():
    lines = plain([{"step": -1, "eval/reward": 0.25, "eval/kl_from_start": 0.0}, {"step": 0}, FULL])
    assert lines[0] == "tis, seed 42"
    heads = "rollout reward held-out KL start tail ratio head mass p/q |log p-log q| tokens/s s/step"
    assert " ".join(lines[1].split()) == heads
    assert lines[2].split() == ["0/12", "-", "0.250*", "0.00e+00", "-", "-", "-", "-", "-"]
    assert lines[3].split() == ["1/12", "-", "0.250", "0.00e+00", "-", "-", "-", "-", "-"]
    numbers = ["0.432", "0.500*", "1.23e-03", "1.034", "0.981/0.978", "1.23e-02", "2310", "3.22"]
    assert lines[4].split() == ["5/12", *numbers]
    assert max(map(len, lines)) <= 110
    ends = [line.index("3.22") for line in lines if "3.22" in line]
    assert ends == [lines[1].index("s/step") + len("s/step") - len("3.22")]


def test_piped_output_has_no_escape_codes_and_notes_stand_alone():
    lines = plain([FULL], notes=["checkpoint in [bold]runs[/bold]/" + "x" * 300])
    assert "\x1b" not in "".join(lines)
    assert lines[-1] == "checkpoint in [bold]runs[/bold]/" + "x" * 300


def test_the_header_comes_again_in_long_logs():
    lines = plain([{"step": step} for step in range(85)], total=85)
    assert sum("held-out" in line for line in lines) == 3


def test_nan_and_infinity_are_shown_and_break_nothing():
    broken = {name: math.nan for name in FULL} | {"step": 0, "train/sc_tail_ratio": math.inf}
    line = plain([broken])[-1]
    assert line.split() == ["1/12", "nan", "nan*", "nan", "inf", "nan/nan", "nan", "nan", "nan"]
    frame, _ = terminal([broken, FULL | {"step": 1}])
    assert "0.432" in frame


def test_a_tail_that_cannot_be_read_has_no_ratio():
    line = plain([FULL | {"train/sc_tail_ratio": 1.0, "train/sc_tail_floor_fraction": 1.0}])[-1]
    assert line.split()[4] == "-"


@pytest.mark.parametrize("width", [120, 60])
def test_the_table_on_a_terminal(width):
    records = [{"step": step, "rollout/reward": step / 10} for step in range(4)]
    frame, stream = terminal([*records, FULL], width=width)
    shown = [
        "tis, seed 42", "5/12", "elapsed 0:00:00", "0.432 ▁▃▄▆█", "0.500 after rollout 5", "1.23e-03", "1.034",
        "0.981/0.978", "1.23e-02", "2310", "3.22",
    ]  # fmt: skip
    for text in shown:
        assert text in frame
    assert all(len(line) <= width for line in frame.splitlines())
    assert "checkpoint of 5 rollouts in [runs]/a" in stream
    assert stream.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_the_last_evaluation_stays_on_a_terminal():
    frame, _ = terminal([FULL, {"step": 5}, {"step": 6}])
    assert "7/12" in frame and "0.500 after rollout 5" in frame


def test_a_terminal_without_unicode_gets_no_sparkline():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, force_terminal=True, width=120)
    with Progress(12, title="tis", console=console) as progress:
        progress.update(FULL)
    file.flush()
    assert b"0.432" in file.buffer.getvalue()


def test_the_display_ends_with_an_error():
    file = io.StringIO()
    with pytest.raises(RuntimeError):
        with Progress(12, title="tis", console=Console(file=file, force_terminal=True)) as progress:
            progress.update(FULL)
            raise RuntimeError
    assert file.getvalue().rstrip().endswith("\x1b[?25h")


def test_remaining_time_follows_the_pace_of_this_process(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    progress = Progress(100, title="continued", console=Console(file=io.StringIO()))
    with progress:
        assert progress._remaining(0.0) == "-"
        for step in (40, 41, 42):
            now[0] += 10
            progress.update({"step": step})
        # 57 rollouts are left, 10 s each
        assert progress._remaining(now[0]) == "0:09:30"
        assert progress._remaining(now[0] + 4) == "0:09:26"


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([math.nan]) == ""
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert sparkline([0.0, math.nan, 1.0]) == "▁█"


def test_the_sparkline_is_of_the_last_thirty():
    frame, _ = terminal([{"step": step, "rollout/reward": float(step % 2)} for step in range(80)])
    assert "▁█" * 15 in frame and "▁█" * 15 + "▁" not in frame
