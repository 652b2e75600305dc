"""The figures of a report, drawn with matplotlib into bytes; nothing here opens a window or touches a file."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from miles_sc.trainer.run_records import (
    ABS_DIFF,
    EVAL_KL,
    EVAL_REWARD,
    ROLLOUT_KL,
    ROLLOUT_MASS,
    TAIL_RATIO,
    TOKENS_PER_SECOND,
    TRAIN_MASS,
    TRAIN_REWARD,
    Band,
    Condition,
    Series,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

# Okabe and Ito's palette, told apart by every common colour blindness; its yellow is left out, too pale on paper
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
# the arms that most people compare look the same in every report
_USUAL_ARMS = {
    "score_centering": 0, "policy_loss": 1, "score_centering+tis": 2, "mis": 3, "tis": 4, "score_centering+mis": 5,
}  # fmt: skip
_GREY = "#666666"
_WIDTH = 11.0
DRIFT_TITLE = "Drift under a constant reward: the right answer is the noise floor of the unbiased sampler"


@dataclass(frozen=True)
class Look:
    """How a series is drawn, the same in every panel."""

    colour: str
    marker: str


def looks(series: Sequence[Series]) -> dict[str, Look]:
    """By label; the same labels in the same order look the same."""
    labels = list(dict.fromkeys(each.label for each in series))
    numbers = {label: _USUAL_ARMS[label] for label in labels if label in _USUAL_ARMS}
    free = [number for number in range(len(_PALETTE)) if number not in numbers.values()] or list(range(len(_PALETTE)))
    for position, label in enumerate(label for label in labels if label not in numbers):
        numbers[label] = free[position % len(free)] + len(_PALETTE) * (position // len(free))
    return {
        # after a round through the palette the marker moves on, so that no two looks are alike
        label: Look(_PALETTE[n % len(_PALETTE)], _MARKERS[(n + n // len(_PALETTE)) % len(_MARKERS)])
        for label, n in numbers.items()
    }


def main_png(series: Sequence[Series]) -> bytes:
    """Everything in one picture, 100 dots per inch."""
    parts = _parts(series)
    heights = [height for height, _ in parts]
    with _plotting() as new_figure:
        figure = new_figure(sum(heights))
        blocks = np.atleast_1d(figure.subfigures(len(parts), 1, height_ratios=heights)) if len(parts) > 1 else [figure]
        for block, (_, draw) in zip(blocks, parts, strict=True):
            draw(block)
        return _saved(figure, "png")


def reward_svg(series: Sequence[Series]) -> bytes | None:
    """Panels of the runs with a real reward; None where there are none."""
    return _svg([each for each in series if each.kind == "reward"])


def drift_svg(series: Sequence[Series]) -> bytes | None:
    """A panel per constant reward and sampler; None where there is no drift run."""
    return _svg([each for each in series if each.kind == "drift"])


def _svg(series: Sequence[Series]) -> bytes | None:
    if not series:
        return None
    ((height, draw),) = _parts(series)
    with _plotting() as new_figure:
        figure = new_figure(height)
        draw(figure)
        return _saved(figure, "svg")


def _parts(series: Sequence[Series]) -> list[tuple[float, Callable[[FigureBase], None]]]:
    """Height in inches and painter of each block of the main figure."""
    reward = [each for each in series if each.kind == "reward"]
    drift = [each for each in series if each.kind == "drift"]
    styles = looks(series)
    parts: list[tuple[float, Callable[[FigureBase], None]]] = []
    if reward:
        parts.append((10.6, lambda figure: _draw_reward(figure, reward, styles)))
    if drift:
        rows, _ = _drift_grid(drift)
        parts.append((1.3 + 3.2 * rows, lambda figure: _draw_drift(figure, drift, styles)))
    return parts


@contextmanager
def _plotting() -> Iterator[Callable]:
    """Gives what makes a blank figure of a height in inches. The user's own matplotlib settings play no part."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("the report needs matplotlib, not installed here; pip install 'miles-sc[report]'") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({
            "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
            "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4",
            "axes.axisbelow": True, "axes.formatter.useoffset": False, "legend.frameon": False, "legend.fontsize": 9,
            "lines.solid_capstyle": "round", "svg.hashsalt": "miles-sc",
        })  # fmt: skip

        def new_figure(height: float) -> Figure:
            figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="white")
            figure.get_layout_engine().set(w_pad=0.1, h_pad=0.09, wspace=0.03, hspace=0.03)
            return figure

        yield new_figure


def _saved(figure: FigureBase, form: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=100, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()


def _draw_reward(figure: FigureBase, series: Sequence[Series], styles: dict[str, Look]) -> None:
    axes = figure.subplots(3, 2, gridspec_kw={"height_ratios": [1.35, 1, 1]}, sharex=True)
    panels = (_reward_panel, _kl_panel, _difference_panel, _mass_panel, _tail_panel, _speed_panel)
    for ax, panel in zip(axes.flat, panels, strict=True):
        panel(ax, series, styles)
    for ax in axes[-1]:
        _count_rollouts(ax)
    _arm_legend(figure, series, styles, {})


def _reward_panel(ax: Axes, series: Sequence[Series], styles: dict[str, Look]) -> None:
    ax.set_title("Reward")
    drawn, held_out = [], []
    for each in series:
        look = styles[each.label]
        drawn.append(_line(ax, each.band(TRAIN_REWARD), look, width=0.8, alpha=0.55, secondary=True))
        held_out.append(_line(ax, each.band(EVAL_REWARD), look, width=2.4))
    _absent_unless(ax, drawn + held_out)
    if any(held_out):
        _line_legend(ax, {"held-out (clean, greedy)": ("-", 2.4), "training, sampler": ("-", 0.8)})
    elif any(drawn):
        _line_legend(ax, {"training, sampler (held-out: not recorded in this run)": ("-", 0.8)})


def _kl_panel(ax: Axes, series: Sequence[Series], styles: dict[str, Look]) -> None:
    ax.set_title("KL of the clean policy from its start")
    ax.set_ylabel("nats per token")
    drawn = [_line(ax, each.band(EVAL_KL), styles[each.label], width=2) for each in series]
    _absent_unless(ax, drawn, hint="(--eval-interval above 0 records it)")
    _from_zero(ax)


def _difference_panel(ax: Axes, series: Sequence[Series], styles: dict[str, Look]) -> None:
    ax.set_title("Sampler mismatch")
    ax.set_ylabel("nats per token")
    recorded = False
    drawn = []
    for name, dashes in ((ABS_DIFF, "-"), (ROLLOUT_KL, "--")):
        for each in series:
            band = each.band(name)
            recorded |= band is not None
            drawn.append(_line(ax, _positive(band), styles[each.label], dashes=dashes, width=1.4))
    if recorded and not any(drawn):
        _message(ax, "0 in every rollout:\nsampler and trainer agree exactly")
    elif _absent_unless(ax, drawn):
        ax.set_yscale("log")
        _line_legend(ax, {"|log p − log q|": ("-", 1.4), "KL(q ‖ p)": ("--", 1.4)})


def _mass_panel(ax: Axes, series: Sequence[Series], styles: dict[str, Look]) -> None:
    ax.set_title("Head mass")
    ax.set_ylabel("probability")
    drawn = [
        _line(ax, each.band(name), styles[each.label], dashes=dashes, width=1.4)
        for name, dashes in ((TRAIN_MASS, "-"), (ROLLOUT_MASS, "--"))
        for each in series
    ]
    hint = "(score centering records it; beside other losses\n--score-centering-observe does)"
    if _absent_unless(ax, drawn, hint):
        _line_legend(ax, {"under the trainer": ("-", 1.4), "under the sampler": ("--", 1.4)})


def _tail_panel(ax: Axes, series: Sequence[Series], styles: dict[str, Look]) -> None:
    ax.set_title("Tail ratio: sampler's tail mass / trainer's")
    bands = [each.band(TAIL_RATIO) for each in series]
    drawn = [_line(ax, band, styles[each.label], width=1.4) for each, band in zip(series, bands, strict=True)]
    if _absent_unless(ax, drawn, hint="(or no tail large enough to read)"):
        ax.axhline(1, color=_GREY, linewidth=0.9, linestyle=":")
        values = np.concatenate([band.mean for band in bands if band is not None])
        if values.min() > 0 and values.max() > 20 * values.min():
            ax.set_yscale("log")


def _speed_panel(ax: Axes, series: Sequence[Series], styles: dict[str, Look]) -> None:
    ax.set_title("Generation speed")
    ax.set_ylabel("tokens per second")
    drawn = [_line(ax, each.band(TOKENS_PER_SECOND), styles[each.label], width=1.4) for each in series]
    if _absent_unless(ax, drawn):
        _from_zero(ax)


def _from_zero(ax: Axes) -> None:
    ax.set_ylim(0, 1.1 * max((line.get_ydata().max() for line in ax.get_lines()), default=1) or 1)


def _draw_drift(figure: FigureBase, series: Sequence[Series], styles: dict[str, Look]) -> None:
    rows, columns = _drift_grid(series)
    axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    figure.suptitle(DRIFT_TITLE, fontsize=12, fontweight="bold")
    conditions = _conditions(series)
    floors = {condition: _floors(series, condition) for condition in conditions}
    for ax, condition in zip(axes, conditions, strict=False):
        own = [each for each in series if each.condition == condition]
        _drift_panel(ax, condition, own, floors[condition], styles)
    for position, ax in enumerate(axes):
        if position >= len(conditions):
            ax.remove()
        elif position + columns >= len(conditions):
            _count_rollouts(ax)
            ax.tick_params(labelbottom=True)
    for ax in axes[: len(conditions) : columns]:
        ax.set_ylabel("KL from start, nats per token")
    axes[0].set_xlim(left=0)
    _arm_legend(figure, series, styles, {"same arm, unbiased sampler": (":", 1.4)} if any(floors.values()) else {})


def _drift_panel(
    ax: Axes, condition: Condition, series: Sequence[Series], floors: Sequence[Series], styles: dict[str, Look]
) -> None:
    ax.set_title(_short(f"reward {condition.reward:+g}, sampler: {condition.sampler}", 44).replace("-", "−"))
    for floor in floors:
        _line(ax, _positive(floor.band(EVAL_KL)), styles[floor.label], dashes=":", width=1.4, secondary=True)
    drawn = [_line(ax, _positive(each.band(EVAL_KL)), styles[each.label], width=2) for each in series]
    if _absent_unless(ax, drawn):
        ax.set_yscale("log")


def _conditions(series: Sequence[Series]) -> list[Condition]:
    return sorted({each.condition for each in series}, key=lambda condition: condition.order)


def _drift_grid(series: Sequence[Series]) -> tuple[int, int]:
    """Rows and columns: a row per reward where that fills the rows evenly."""
    conditions = _conditions(series)
    rewards = len({condition.reward for condition in conditions})
    columns = len(conditions) // rewards if len(conditions) % rewards == 0 and len(conditions) // rewards <= 3 else 3
    return -(-len(conditions) // columns), columns


def _floors(series: Sequence[Series], condition: Condition) -> list[Series]:
    """The runs of the same reward whose sampler is the trainer's own policy."""
    if condition.on_policy:
        return []
    return [each for each in series if each.condition.on_policy and each.condition.reward == condition.reward]


def _positive(band: Band | None) -> Band | None:
    """What a logarithmic axis can show: an exact 0, as before any training, has no place on it."""
    if band is None or not (band.mean > 0).any():
        return None
    kept = band.mean > 0
    floor = band.mean[kept].min()
    return Band(band.rollouts[kept], band.mean[kept], np.clip(band.low[kept], floor / 10, None), band.high[kept])


def _line(
    ax: Axes, band: Band | None, look: Look, *, width: float, dashes: str = "-", alpha: float = 1.0,
    secondary: bool = False,
) -> bool:  # fmt: skip
    """Mean and least-to-greatest band over seeds; a secondary line has no band and no markers.

    Returns:
        Whether there was anything to draw.
    """
    if band is None:
        return False
    points = {"marker": look.marker, "markersize": 3.5 + 0.6 * width, "markevery": max(len(band.rollouts) // 12, 1)}
    points |= {"markeredgecolor": "white", "markeredgewidth": 0.5}
    ax.plot(
        band.rollouts, band.mean, color=look.colour, linestyle=dashes, linewidth=width, alpha=alpha,
        **({} if secondary and len(band.rollouts) > 1 else points),
    )  # fmt: skip
    if not secondary and (band.high > band.low).any():
        ax.fill_between(band.rollouts, band.low, band.high, color=look.colour, alpha=0.15, linewidth=0)
    return True


def _absent_unless(ax: Axes, drawn: Sequence[bool], hint: str = "") -> bool:
    """Says so where nothing was drawn; returns whether something was."""
    if not any(drawn):
        _message(ax, "not recorded in this run" + (f"\n{hint}" if hint else ""))
    return any(drawn)


def _message(ax: Axes, text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=_GREY)
    ax.grid(False)
    ax.set_yticks([])


def _count_rollouts(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel("rollouts done")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))


def _line_legend(ax: Axes, entries: dict[str, tuple[str, float]]) -> None:
    """What line styles mean, on the line of the title, where no data can lie under it. Colours are explained once."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=_GREY, linestyle=dashes, linewidth=width) for dashes, width in entries.values()]
    ax.legend(
        handles, list(entries), loc="lower right", bbox_to_anchor=(1, 1), ncols=len(entries), borderaxespad=0.1,
        columnspacing=1.2, handlelength=1.8,
    )  # fmt: skip


def _arm_legend(
    figure: FigureBase, series: Sequence[Series], styles: dict[str, Look], lines: dict[str, tuple[str, float]]
) -> None:
    from matplotlib.lines import Line2D

    handles, texts = [], []
    for label in dict.fromkeys(each.label for each in series):
        handles.append(Line2D([], [], color=styles[label].colour, marker=styles[label].marker, linewidth=2.4))
        texts.append(_short(label))
    for text, (dashes, width) in lines.items():
        handles.append(Line2D([], [], color=_GREY, linestyle=dashes, linewidth=width))
        texts.append(text)
    columns = min(len(texts), max(1, 110 // (max(map(len, texts)) + 8)))
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, fontsize=10)


def _short(text: str, longest: int = 60) -> str:
    """A name as matplotlib can draw it: one line, no mathematics, not hidden from legends."""
    text = " ".join(text.split())
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")
