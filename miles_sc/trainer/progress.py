"""The live display of a run: a bar and the current numbers on a terminal, a line per rollout everywhere else."""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_LENGTH = 30
# how many rollouts the remaining time is judged by
_PACE_LENGTH = 20
_HEADER_EVERY = 40
# two groups of numbers side by side, with a whole sparkline, need this much
_TWO_COLUMNS_WIDTH = 100
# heading and width of the columns of plain lines
_COLUMNS = (
    ("rollout", 10), ("reward", 7), ("held-out", 8), ("KL start", 8), ("tail ratio", 10), ("head mass p/q", 13),
    ("|log p-log q|", 13), ("tokens/s", 8), ("s/step", 7),
)  # fmt: skip


class Progress:
    """What a user watches while training. A context manager; call :meth:`update` after each rollout.

    On a terminal a bar (rollouts, elapsed, remaining) over a table of the current values; elsewhere a line per rollout,
    of less than 110 columns and flushed at once. There ``*`` marks an evaluation made at that rollout; without it the
    last one is shown. A metric that is absent shows ``-``.
    """

    def __init__(self, total: int, *, title: str, console: Console | None = None) -> None:
        """
        Args:
            total: rollouts in the whole run, those done before it was continued included.
            title: the arm and its seed.
            console: where to; the standard output by default.
        """
        self._total, self._title = total, title
        self._console = console or Console()
        self._done = 0
        self._record: Mapping[str, float] = {}
        self._evaluation: Mapping[str, float] = {}
        self._evaluated_at = 0
        # tuples, replaced whole: the display is drawn by a thread of its own
        self._rewards: tuple[float, ...] = ()
        self._pace: tuple[float, ...] = ()
        self._started = self._updated = time.monotonic()
        self._lines = 0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._started = self._updated = time.monotonic()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2)
            self._live.start()
        else:
            self._print(self._title)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, record: Mapping[str, float]) -> None:
        """Shows a rollout's metrics; ``step`` counts from 0, and -1 is an evaluation before any training."""
        now = time.monotonic()
        if record["step"] >= 0:
            self._pace = (*self._pace, now - self._updated)[-_PACE_LENGTH:]
            self._rewards = (*self._rewards, record.get("rollout/reward", math.nan))[-_SPARK_LENGTH:]
        self._updated = now
        self._done = int(record["step"]) + 1
        self._record = record
        if "eval/reward" in record or "eval/kl_from_start" in record:
            self._evaluation, self._evaluated_at = record, self._done
        if self._live is None:
            self._print_line()
        else:
            self._live.refresh()

    def note(self, text: str) -> None:
        """A line of its own, such as that a checkpoint was written."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()

    def _print_line(self) -> None:
        if self._lines % _HEADER_EVERY == 0:
            self._print(_aligned([heading for heading, _ in _COLUMNS]))
        self._lines += 1
        record, fresh = self._record, "*" if self._record is self._evaluation else " "
        self._print(
            _aligned([
                f"{self._done}/{self._total}",
                _number(record.get("rollout/reward"), ".3f"),
                _number(self._evaluation.get("eval/reward"), ".3f") + fresh,
                _number(self._evaluation.get("eval/kl_from_start"), ".2e"),
                _tail_ratio(record),
                _head_mass(record),
                _number(record.get("train/train_rollout_logprob_abs_diff"), ".2e"),
                _number(record.get("perf/rollout_tokens_per_second"), ".0f"),
                _number(record.get("perf/step_seconds"), ".2f"),
            ])
        )  # fmt: skip

    def _render(self) -> RenderableType:
        now = time.monotonic()
        bar = Table.grid(padding=(0, 1), expand=False)
        bar.add_row(
            ProgressBar(total=self._total, completed=self._done, width=30),
            Text(f"{self._done}/{self._total}", no_wrap=True),
            Text(f"elapsed {_clock(now - self._started)}", no_wrap=True),
            Text(f"left {self._remaining(now)}", no_wrap=True),
        )
        title = Text(self._title, style="bold", overflow="ellipsis", no_wrap=True)
        return Group(title, bar, self._values())

    def _values(self) -> Table:
        record, evaluation = self._record, self._evaluation
        held_out = _number(evaluation.get("eval/reward"), ".3f")
        policy = [
            ("reward, sampler", f"{_number(record.get('rollout/reward'), '.3f')} {self._sparkline()}".rstrip()),
            ("reward, held-out", f"{held_out} after rollout {self._evaluated_at}" if evaluation else "-"),
            ("KL from start", _number(evaluation.get("eval/kl_from_start"), ".2e")),
            ("step, from 0", _number(record.get("step"), ".0f")),
        ]
        sampler = [
            ("tail ratio", _tail_ratio(record)),
            ("head mass, train/rollout", _head_mass(record)),
            ("|log p - log q|", _number(record.get("train/train_rollout_logprob_abs_diff"), ".2e")),
            ("tokens/s", _number(record.get("perf/rollout_tokens_per_second"), ".0f")),
            ("s/step", _number(record.get("perf/step_seconds"), ".2f")),
        ]
        table = Table.grid(padding=(0, 2))
        if self._console.width < _TWO_COLUMNS_WIDTH:
            for pair in policy + sampler:
                table.add_row(*_pair(pair))
        else:
            for left, right in itertools.zip_longest(policy, sampler, fillvalue=("", "")):
                table.add_row(*_pair(left), *_pair(right))
        return table

    def _sparkline(self) -> str:
        return "" if self._console.options.ascii_only else sparkline(self._rewards)

    def _remaining(self, now: float) -> str:
        if not self._pace:
            return "-"
        rollouts = self._total - self._done
        return _clock(max(rollouts * sum(self._pace) / len(self._pace) - (now - self._updated), 0.0))


def sparkline(values: Sequence[float]) -> str:
    """A block per finite value, low to high over their own range; equal values are drawn half high."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    if span == 0:
        return _BLOCKS[3] * len(finite)
    return "".join(_BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1))] for value in finite)


def _pair(pair: tuple[str, str]) -> tuple[Text, Text]:
    name, value = pair
    return Text(name, style="dim", no_wrap=True), Text(value, overflow="ellipsis", no_wrap=True)


def _aligned(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True)).rstrip()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _tail_ratio(record: Mapping[str, float]) -> str:
    # where no token's tail can be read, the ratio recorded is a placeholder
    if record.get("train/sc_tail_floor_fraction") == 1:
        return "-"
    return _number(record.get("train/sc_tail_ratio"), ".4g")


def _head_mass(record: Mapping[str, float]) -> str:
    masses = [record.get(f"train/sc_{side}_head_mass") for side in ("train", "rollout")]
    return "-" if masses == [None, None] else "/".join(_number(mass, ".3f") for mass in masses)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
