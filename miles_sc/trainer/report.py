"""The report of a run or a comparison: one page that stands alone, and its main figure as a picture."""

import base64
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from miles_sc.trainer.figures import drift_svg, main_png, reward_svg
from miles_sc.trainer.report_layout import DRIFT_PANELS, REWARD_PANELS, framed
from miles_sc.trainer.run_records import (
    ESS,
    EVAL_KL,
    EVAL_REWARD,
    ROLLOUT_MASS,
    STEP_SECONDS,
    TAIL_RATIO,
    TOKENS_PER_SECOND,
    TRAIN_MASS,
    Run,
    Series,
    Spread,
    flag,
    read_runs,
    series_of,
)
from miles_sc.trainer.run_summary import notes, summary

Column = tuple[str, Callable[[Series], str]]


def write_report(output_dir: Path) -> Path:
    """Writes ``report.html`` and ``report.png`` about every run at or below ``output_dir``.

    Returns:
        The page. An error leaves what was there before.

    Raises:
        ValueError: no run there, a record that cannot be read, no matplotlib, or a folder that cannot be written.
    """
    output_dir = Path(output_dir)
    runs = read_runs(output_dir)
    recorded = series_of([run for run in runs if run.records])
    page = _page(output_dir, runs, recorded)
    _replace({output_dir / "report.png": main_png(recorded), output_dir / "report.html": page.encode()})
    return output_dir / "report.html"


def _replace(files: dict[Path, bytes]) -> None:
    """Puts every file in place only after all of them are on the disk."""
    partial = {path: path.with_name(f".{path.name}.{os.getpid()}.partial") for path in files}
    try:
        for path, content in files.items():
            partial[path].write_bytes(content)
        for path in files:
            os.replace(partial[path], path)
    except OSError as error:
        folder, reason = next(iter(files)).parent, error.strerror or error
        raise ValueError(f"{folder}: the report cannot be written ({reason}); make the folder writable") from error
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


def _page(output_dir: Path, runs: Sequence[Run], series: Sequence[Series]) -> str:
    name = output_dir.resolve().name
    parts = [
        f"<h1>Training report: {escape(name)}</h1>",
        f"<p class='summary'>{escape(summary(series))}</p>",
        *(f"<p class='note'>{escape(note)}</p>" for note in notes(runs, series)),
        "<h2>Numbers</h2>",
        _numbers(series),
    ]
    for heading, picture, panels in (
        ("Training on the task", reward_svg(series), REWARD_PANELS),
        ("Drift under a constant reward", drift_svg(series), DRIFT_PANELS),
    ):
        if picture:
            parts += [f"<h2>{heading}</h2>", _figure(picture, panels), _reading(panels)]
    parts += ["<h2>Settings</h2>", _settings(series), "<h2>Raw metrics</h2>", _raw(output_dir, runs)]
    return framed(title=escape(f"Training report: {name}"), body="\n".join(parts))


def _figure(svg: bytes, panels: Sequence[tuple[str, str]]) -> str:
    # as an image and not inline: names inside cannot reach the page, nor one figure's ids the other's
    source = base64.b64encode(svg).decode()
    alternative = "Panels over rollouts: " + ", ".join(name for name, _ in panels)
    return f"<figure><img alt='{escape(alternative)}' src='data:image/svg+xml;base64,{source}'></figure>"


def _numbers(series: Sequence[Series]) -> str:
    parts = []
    for kind, heading in (("reward", "Task reward"), ("drift", "Constant reward (drift)")):
        of_kind = [each for each in series if each.kind == kind]
        if of_kind:
            columns = _columns(kind)
            head = "".join(f"<th scope='col'>{escape(title)}</th>" for title, _ in columns)
            rows = "".join(_row(columns, each) for each in of_kind)
            parts += [
                f"<div class='wide'><table class='numbers {kind}'><caption>{heading}</caption>",
                f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>",
            ]
    parts.append(
        "<p class='small'>Mean over seeds ± sample standard deviation where there are several. First and last are "
        "each seed's first and last evaluation; tail ratio, head mass and effective sample share are means over "
        "rollouts, speed and seconds medians. A dash: not recorded.</p>"
    )
    return "\n".join(parts)


def _columns(kind: str) -> list[Column]:
    constant = [("Reward", lambda s: f"{s.condition.reward:+g}")]
    held_out = [
        ("Held-out reward, first", lambda s: _spread(s.first(EVAL_REWARD), ".3f")),
        ("Held-out reward, last", lambda s: _spread(s.last(EVAL_REWARD), ".3f")),
    ]
    return [
        ("Arm", lambda s: s.label),
        *(constant if kind == "drift" else []),
        ("Sampler", lambda s: s.condition.sampler),
        ("Seeds", _seeds),
        ("Rollouts", _rollouts),
        *(held_out if kind == "reward" else []),
        ("KL from start, last", lambda s: _spread(s.last(EVAL_KL), "#.3g")),
        ("Tail ratio", lambda s: _spread(s.mean(TAIL_RATIO), ".3f")),
        ("Head mass, trainer", lambda s: _spread(s.mean(TRAIN_MASS), ".4f")),
        ("Head mass, sampler", lambda s: _spread(s.mean(ROLLOUT_MASS), ".4f")),
        ("Effective sample share", lambda s: _spread(s.mean(ESS), ".3f")),
        ("Tokens/s", lambda s: _spread(s.median(TOKENS_PER_SECOND), ".0f")),
        ("Seconds per step", lambda s: _spread(s.median(STEP_SECONDS), "#.3g")),
    ]


def _row(columns: Sequence[Column], series: Series) -> str:
    (_, label), *others = columns
    cells = "".join(_cell(text(series)) for _, text in others)
    return f"<tr><th scope='row'>{escape(label(series))}</th>{cells}</tr>"


def _cell(text: str) -> str:
    mean, sign, deviation = escape(text).partition(" ± ")
    return f"<td>{mean} <span>± {deviation}</span></td>" if sign else f"<td>{mean}</td>"


def _seeds(series: Series) -> str:
    seeds = sorted(run.seed for run in series.runs)
    consecutive = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]}–{seeds[-1]}" if consecutive else ", ".join(map(str, seeds))


def _rollouts(series: Series) -> str:
    """Recorded rollouts of each seed, once if they agree; of how many where some are missing."""
    counts = {(run.recorded, run.rollouts) for run in series.runs}
    return ", ".join(str(done) if done == asked else f"{done} of {asked}" for done, asked in sorted(counts))


def _spread(value: Spread | None, form: str) -> str:
    return value.text(form) if value else "–"


def _reading(lines: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines)
    return f"<dl class='reading'>{items}</dl>"


def _settings(series: Sequence[Series]) -> str:
    """Every flag with its value; where runs differ, each value with whose it is. The differing ones come first."""
    # where the runs lie is told under raw metrics
    names = sorted({name for each in series for run in each.runs for name in run.args} - {"output_dir"})
    rows: dict[bool, list[str]] = {True: [], False: []}
    for name in names:
        owners: dict[str, list[str]] = {}
        for each in series:
            owners.setdefault(_of_runs(each, name), []).append(_title(each, series))
        differ = len(owners) > 1
        cells = [_owned(*each) for each in owners.items()] if differ else [escape(value) for value in owners]
        cell = "".join(cells)
        rows[differ].append(f"<tr><th scope='row'><code>{escape(flag(name))}</code></th><td>{cell}</td></tr>")
    headings = {True: "Settings that differ between arms", False: "Settings that all arms share"}
    return "\n".join(
        f"<details><summary>{headings[differ]} ({len(lines)})</summary>"
        f"<div class='wide'><table class='settings'>{''.join(lines)}</table></div></details>"
        for differ, lines in rows.items()
        if lines
    )


def _owned(value: str, labels: Sequence[str]) -> str:
    return f"<div>{escape(value)} <span>{escape(', '.join(labels))}</span></div>"


def _title(series: Series, among: Sequence[Series]) -> str:
    """The label, with the condition where the label alone is not unique."""
    if sum(each.label == series.label for each in among) == 1:
        return series.label
    reward = series.condition.reward
    return f"{series.label} ({'task reward' if reward is None else f'reward {reward:+g}'}, {series.condition.sampler})"


def _of_runs(series: Series, name: str) -> str:
    return ", ".join(dict.fromkeys(_setting(run.args.get(name)) for run in series.runs))


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == []:
        return "not set"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _raw(output_dir: Path, runs: Sequence[Run]) -> str:
    items = []
    for run in runs:
        path = (run.directory / "metrics.jsonl").relative_to(output_dir).as_posix()
        about = f"{run.arm}, seed {run.seed}, {run.recorded} of {run.rollouts} rollouts"
        items.append(f"<li><a href='{escape(quote(path))}'>{escape(path)}</a> <span>{escape(about)}</span></li>")
    return (
        "<p>One JSON object per rollout. <code>step</code> counts from 0: rollout 1 of the figures is step 0, an "
        "evaluation before any training is step -1. The settings of each run lie beside it in "
        "<code>run.json</code>.</p>"
        f"<ul>{''.join(items)}</ul>"
    )
