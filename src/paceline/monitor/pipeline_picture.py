"""The picture of one step of a pipeline: a row for each rank, a bar for each pass of a micro-batch."""

from typing import TYPE_CHECKING

from paceline.monitor.pipeline import PipelineStep
from paceline.monitor.plot_style import Palette, dress, make_figure, place_legend, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NUMBERED = 120
"""Largest number of bars on a rank that are wide enough for numbers."""


def draw_pipeline(step: PipelineStep, palette: Palette) -> bytes:
    """Return a PNG: time to the right, the first stage's rank on top; empty areas are the bubble.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = make_figure(11, 1.3 + min(0.42 * len(step.events), 6.0), palette)
    room = 0.62 / figure.get_figheight()
    axes = figure.add_axes((0.06, room, 0.925, 1 - 1.75 * room))
    formula = "" if step.formula is None else f", {100 * step.formula:.1f}% by formula"
    dress(axes, f"step {step.step:,}: {100 * step.bubble:.1f}% idle{formula}", palette, grid="x")
    for row in range(len(step.events)):
        _draw_rank(axes, step, row, palette)
    _dress_axes(axes, step, palette)
    place_legend(axes, palette, num_columns=4)
    return to_png(figure)


def _draw_rank(axes: "Axes", step: PipelineStep, row: int, palette: Palette) -> None:
    event = step.events[row]
    shift_s = event.began_unix_s - step.began_unix_s
    kinds = {
        "forward": (palette.train, 0.5),
        "backward": (palette.train, 1.0),
        "inputs": (palette.held_out, 1.0),
        "weights": (palette.held_out, 0.45),
    }
    for work, (color, alpha) in kinds.items():
        places = [i for i, one in enumerate(event.works) if one == work]
        bars = [(1e3 * (shift_s + event.began_s[i]), 1e3 * (event.ended_s[i] - event.began_s[i])) for i in places]
        is_new = not any(work in other.works for other in step.events[:row])  # a legend names each colour once
        label = ("backward to " * (work in ("inputs", "weights")) + work) if is_new and bars else ""
        axes.broken_barh(
            bars, (row + 0.08, 0.84), facecolor=color, alpha=alpha, edgecolor=palette.paper, linewidth=0.8, label=label
        )
        for i, (left_ms, width_ms) in zip(places, bars, strict=True):
            if len(event.works) <= _MOST_NUMBERED and width_ms > 8 * step.duration_s:  # 0.8% of the picture's width
                text = str(event.micro_batches[i])
                axes.text(left_ms + width_ms / 2, row + 0.5, text, ha="center", va="center", size=7, color=palette.ink)


def _dress_axes(axes: "Axes", step: PipelineStep, palette: Palette) -> None:
    from matplotlib.ticker import EngFormatter

    ranks = step.events[0].ranks
    axes.set_yticks([row + 0.5 for row in range(len(ranks))], [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks), 0)
    axes.set_xlim(0, 1e3 * step.duration_s)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(
        "ms since the first rank began; numbers are micro-batches",
        color=palette.muted,
        fontsize=8.5,
        loc="right",
        labelpad=1,
    )
