#!/usr/bin/env python
"""Draws docs/images/layout_*.png: what each context-parallel rank holds of three small samples.

Everything drawn is read from :func:`miles_sc.parallel.context.context_map`, the map that training itself uses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from miles_sc.parallel.context import ContextLayout, ContextMap, context_map

PROMPTS, RESPONSES = (3, 2, 4), (4, 0, 6)  # the second sample has no response
NAMES = "ABC"
LAYOUTS = {
    "layout_thd_zigzag.png": ContextLayout("thd", False, 2),
    "layout_bshd_zigzag.png": ContextLayout("bshd", False, 2),
    "layout_thd_allgather.png": ContextLayout("thd", True, 2),
    "layout_bshd_allgather.png": ContextLayout("bshd", True, 2),
}

# prompt and response of each sample: blue, green and vermilion of Okabe and Ito's palette, told apart by every common colour
# blindness, and their tints
LIGHT, DARK = ("#BFDDEF", "#BFE7DB", "#F6D3B8"), ("#0072B2", "#009E73", "#C45500")
PADDING, HATCH, INK = "#EFEFEF", "#B0B0B0", "#222222"

# all lengths in slots
WIDTH, SLOT_INCHES = 24.0, 0.375
LABEL, MARGIN = 2.9, 0.45
NEXT_SAMPLE, NEXT_CHUNK = 0.5, 0.25
BETWEEN, LEGEND = 0.75, 1.6


def draw(layout: ContextLayout) -> Figure:
    """One rank with everything, then each rank of the layout."""
    alone = ("one rank", slots(ContextLayout(layout.qkv_format), 0))
    shared = [(f"rank {rank} of {layout.size}", slots(layout, rank)) for rank in range(layout.size)]
    lines = [[alone], *([block] for block in shared)] if layout.packed else [[alone], shared]
    height = 2 * MARGIN + LEGEND + sum(len(line[0][1].samples) + BETWEEN for line in lines)
    figure = Figure(figsize=(WIDTH * SLOT_INCHES, height * SLOT_INCHES), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    ax.set_axis_off()
    y = MARGIN
    for line in lines:
        x, rows = 0.0, len(line[0][1].samples)
        for label, held in line:
            x += LABEL
            ax.text(x - 0.4, y + rows / 2, label, ha="right", va="center", fontsize=11, color=INK)
            x = max(_draw_row(ax, held, row, x, y + row) for row in range(rows)) + BETWEEN
        y += rows + BETWEEN
    _draw_legend(ax, y)
    return figure


def slots(layout: ContextLayout, rank: int) -> ContextMap:
    """The map of the three samples."""
    return context_map([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)], RESPONSES, layout, rank=rank)


def _draw_row(ax: Axes, held: ContextMap, row: int, x: float, y: float) -> float:
    """Returns where the row ends."""
    width = held.samples.shape[1]
    scored = set(held.rows.tolist())
    before = None
    for column in range(width):
        sample, position = int(held.samples[row, column]), int(held.positions[row, column])
        if before is not None and before != (sample, position - 1):
            x += NEXT_CHUNK if before[0] == sample else NEXT_SAMPLE
        if held.tokens[row, column] < 0:
            _square(ax, x, y)
        else:
            response = position >= held.total_lengths[sample] - held.response_lengths[sample]
            _square(ax, x, y, sample=sample, response=response)
            colour = "white" if response else INK
            ax.text(x + 0.5, y + 0.38, str(position), ha="center", va="center", fontsize=10, color=colour)
            if row * width + column in scored:
                _dot(ax, x + 0.5, y + 0.77)
        x, before = x + 1, (sample, position)
    return x


def _square(ax: Axes, x: float, y: float, *, sample: int = -1, response: bool = False, side: float = 1.0) -> None:
    """A slot; without a sample it is padding."""
    place = {"xy": (x + 0.03, y + 0.03), "width": side - 0.06, "height": side - 0.06, "linewidth": 0}
    if sample < 0:
        ax.add_patch(Rectangle(**place, facecolor=PADDING, edgecolor=HATCH, hatch="////"))
    else:
        ax.add_patch(Rectangle(**place, facecolor=(DARK if response else LIGHT)[sample]))


def _dot(ax: Axes, x: float, y: float) -> None:
    ax.plot(x, y, "o", color="black", markersize=5.5, markeredgecolor="white", markeredgewidth=1.1)


def _draw_legend(ax: Axes, y: float) -> None:
    side = 0.62
    for sample, (name, response) in enumerate(zip(NAMES, RESPONSES, strict=True)):
        x = LABEL + 7 * sample
        _square(ax, x, y, sample=sample, side=side)
        if response:
            _square(ax, x + side, y, sample=sample, response=True, side=side)
            _note(ax, x + 2 * side, y, f"{name}: prompt, response", side)
        else:
            _note(ax, x + side, y, f"{name}: prompt, no response", side)
    y += 0.95
    _square(ax, LABEL, y, side=side)
    _note(ax, LABEL + side, y, "padding", side)
    _dot(ax, LABEL + 7 + side / 2, y + side / 2)
    _note(ax, LABEL + 7 + side, y, "scored: its logits predict a response token", side)


def _note(ax: Axes, x: float, y: float, text: str, side: float) -> None:
    ax.text(x + 0.2, y + side / 2, text, ha="left", va="center", fontsize=10, color=INK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent.parent / "docs/images", help="default: docs/images")
    output = parser.parse_args().output
    matplotlib.rcdefaults()
    matplotlib.rcParams["hatch.linewidth"] = 0.8
    for name, layout in LAYOUTS.items():
        draw(layout).savefig(output / name, dpi=150, metadata={"Software": None})
        print(output / name)


if __name__ == "__main__":
    main()
