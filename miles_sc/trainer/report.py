"""The report of a run or a comparison: one page that stands alone, and its main figure as a picture."""

import base64
import math
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from miles_sc.trainer.figures import drift_svg, main_png, reward_svg
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
    """Writes ``report.html`` and ``report.png`` about every run at or below ``output_dir``; both whole or neither touched.

    Returns:
        The page.

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
        folder = next(iter(files)).parent
        raise ValueError(f"{folder}: the report cannot be written ({error.strerror}); make the folder writable") from error
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
    if picture := reward_svg(series):
        parts += ["<h2>Training on the task</h2>", _figure(picture, "Panels of the runs with a task reward"), _reading(_REWARD_PANELS)]
    if picture := drift_svg(series):
        parts += ["<h2>Drift</h2>", _figure(picture, "Divergence from the start under a constant reward"), _reading(_DRIFT_PANELS)]
    parts += ["<h2>Settings</h2>", _settings(series), "<h2>Raw metrics</h2>", _raw(output_dir, runs)]
    return _DOCUMENT.format(title=escape(f"Training report: {name}"), style=_STYLE, body="\n".join(parts))


def _figure(svg: bytes, alternative: str) -> str:
    # as an image and not inline: names inside cannot reach the page, nor one figure's ids the other's
    source = base64.b64encode(svg).decode()
    return f"<figure><img alt='{escape(alternative)}' src='data:image/svg+xml;base64,{source}'></figure>"


def _numbers(series: Sequence[Series]) -> str:
    parts = []
    for kind, heading in (("reward", "Task reward"), ("drift", "Constant reward (drift)")):
        of_kind = [each for each in series if each.kind == kind]
        if of_kind:
            columns = _columns(kind)
            head = "".join(f"<th scope='col'>{escape(title)}</th>" for title, _ in columns)
            rows = "".join(_row(columns, each) for each in of_kind)
            parts.append(f"<div class='wide'><table class='numbers {kind}'><caption>{heading}</caption>")
            parts.append(f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>")
    parts.append(
        "<p class='small'>Mean over seeds ± sample standard deviation where there are several. First and last are the first "
        "and last evaluation of each seed; tail ratio, head mass and sample size are means over rollouts, speed and seconds "
        "medians. A dash: not recorded.</p>"
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
        ("Seeds", lambda s: ", ".join(str(run.seed) for run in s.runs)),
        ("Rollouts", _rollouts),
        *(held_out if kind == "reward" else []),
        ("KL from start, last", lambda s: _spread(s.last(EVAL_KL), ".3g")),
        ("Tail ratio", lambda s: _spread(s.mean(TAIL_RATIO), ".3f")),
        ("Head mass, trainer", lambda s: _spread(s.mean(TRAIN_MASS), ".4f")),
        ("Head mass, sampler", lambda s: _spread(s.mean(ROLLOUT_MASS), ".4f")),
        ("Effective sample share", lambda s: _spread(s.mean(ESS), ".3f")),
        ("Tokens/s", lambda s: _spread(s.median(TOKENS_PER_SECOND), ".0f")),
        ("Seconds per step", lambda s: _spread(s.median(STEP_SECONDS), ".3g")),
    ]


def _row(columns: Sequence[Column], series: Series) -> str:
    (_, label), *others = columns
    cells = "".join(_cell(text(series)) for _, text in others)
    return f"<tr><th scope='row'>{escape(label(series))}</th>{cells}</tr>"


def _cell(text: str) -> str:
    mean, sign, deviation = escape(text).partition(" ± ")
    return f"<td>{mean} <span>± {deviation}</span></td>" if sign else f"<td>{mean}</td>"


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
    names = sorted({name for each in series for run in each.runs for name in run.args})
    values = {name: {_title(each, series): _of_runs(each, name) for each in series} for name in names}
    rows: dict[bool, list[str]] = {True: [], False: []}
    for name, by_series in values.items():
        differ = len(set(by_series.values())) > 1
        lines = [f"<div><b>{escape(label)}</b> {escape(value)}</div>" for label, value in by_series.items()]
        cell = "".join(lines) if differ else escape(next(iter(by_series.values())))
        rows[differ].append(f"<tr><th scope='row'><code>{escape(flag(name))}</code></th><td>{cell}</td></tr>")
    summaries = {True: "Settings that differ between arms", False: "Settings that all arms share"}
    return "\n".join(
        f"<details><summary>{summaries[differ]} ({len(lines)})</summary><table class='settings'>{''.join(lines)}</table></details>"
        for differ, lines in rows.items()
        if lines
    )


def _title(series: Series, among: Sequence[Series]) -> str:
    """The label, with the condition where the label alone is not unique."""
    if sum(each.label == series.label for each in among) == 1:
        return series.label
    reward = series.condition.reward
    return f"{series.label} ({'task reward' if reward is None else f'reward {reward:+g}'}, {series.condition.sampler})"


def _of_runs(series: Series, name: str) -> str:
    return ", ".join(dict.fromkeys(_setting(run.args.get(name)) for run in series.runs))


def _setting(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
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
        "<p>One JSON object per rollout; <code>step</code> counts from 0, so that rollout 1 of the figures is step 0, and an "
        f"evaluation before any training is step -1. Settings lie beside each in <code>run.json</code>.</p><ul>{''.join(items)}</ul>"
    )


_REWARD_PANELS = (
    ("Reward", "Thick: greedy answers of the clean trainer policy to problems it never trains on, the number that counts. Thin: "
     "what the sampler earned, noisier and of another distribution. Small tasks and few rollouts may show no gain from any loss."),
    ("KL of the clean policy from its start", "How far the policy has walked. Learning moves it too, so a low value is no merit "
     "by itself; compare it at equal reward."),
    ("Sampler against trainer", "The mismatch that training meets. Where it is near zero the run is on-policy and centering has "
     "nothing to subtract. Staleness counts here as well, and centering alone does not cure it."),
    ("Mass of the recorded candidates", "Share of the distribution that the K recorded candidates hold. The centering term is "
     "exact on them and scales the rest by one ratio; the less they hold, the coarser it is."),
    ("Tail ratio", "The scale put on what the candidates do not hold. Near 1 the tails agree; far from 1, raise K. Rollouts "
     "without a readable tail are left out."),
    ("Generation speed", "Tokens per second of the sampler; recording candidates costs some of it."),
    ("Bands", "Lines are means over seeds, bands reach from the lowest to the highest seed. Overlapping bands do not tell arms "
     "apart."),
)  # fmt: skip
_DRIFT_PANELS = (
    ("KL from start, logarithmic", "The reward is a constant, so the true gradient is zero and whatever moves the policy is drift "
     "or noise. The right answer is the noise floor of the unbiased sampler, not zero."),
    ("Dotted lines", "The same arm with a sampler that is the trainer's own policy, where such a run is there. Above its dotted "
     "line an arm drifts; on the line it does not."),
    ("Stale samplers", "A stale sampler is an older policy; centering alone does not cure that."),
)  # fmt: skip

_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --back: #f6f6f4; --card: #ffffff; --line: #d9d9d6; --faint: #5b5b5b; --link: #005a9c; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8e6; --back: #17181a; --card: #202225; --line: #3a3d42; --faint: #a9abae; --link: #7cc0f5; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1.25rem 4rem; background: var(--back); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .2rem 0 .8rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
a { color: var(--link); } code { font-size: .9em; }
.summary { font-size: 1.05rem; } .small { color: var(--faint); font-size: .85rem; }
.note { border-left: .25rem solid #d55e00; background: var(--card); padding: .45rem .8rem; margin: .5rem 0; font-size: .92rem; }
.wide { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; background: var(--card); border: 1px solid var(--line); font-size: .85rem; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
.numbers { font-variant-numeric: tabular-nums; min-width: 100%; overflow-wrap: normal; }
.numbers thead th { vertical-align: bottom; font-weight: 600; color: var(--faint); }
.numbers td span { display: block; white-space: nowrap; color: var(--faint); }
.settings th { font-weight: 400; white-space: nowrap; }
figure { margin: .6rem 0; padding: .75rem; background: #ffffff; border: 1px solid var(--line); border-radius: .5rem; }
figure img { display: block; width: 100%; height: auto; }
.reading { display: grid; grid-template-columns: minmax(9rem, 14rem) 1fr; gap: .35rem 1rem; font-size: .92rem; margin: .8rem 0; }
.reading dt { font-weight: 600; } .reading dd { margin: 0; }
details { margin: .5rem 0; } summary { cursor: pointer; } ul { padding-left: 1.2rem; } li span { color: var(--faint); font-size: .85rem; }
@media (max-width: 40rem) { .reading { grid-template-columns: 1fr; } .reading dd { margin-bottom: .5rem; } }
@media print { body { max-width: none; background: #ffffff; } figure { break-inside: avoid; } }
"""
_DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
