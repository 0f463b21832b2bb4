"""The picture of one step: the worker's computing, and the exchange of each bucket."""

from typing import TYPE_CHECKING

from paceline.monitor.formatting import size
from paceline.monitor.plot_style import Palette, dress, make_figure, place_legend, to_png
from paceline.monitor.timeline import Span, TimedStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_LABELS = 24
"""Largest number of buckets that are all labelled."""


def draw_gantt(step: TimedStep, palette: Palette) -> bytes:
    """Return a PNG: a row for computing, and below it one row per bucket, in launch order.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    num_buckets = len(step.buckets)
    figure = make_figure(11, 1.3 + min(0.27 * (1 + num_buckets), 6.0), palette)
    room = 0.62 / figure.get_figheight()
    axes = figure.add_axes((0.11, room, 0.875, 1 - 1.75 * room))
    dress(axes, f"a typical step of rank {step.rank}", palette, grid="x")
    computing_height = max(1.0, num_buckets / _MAX_LABELS)  # in rows of a bucket
    _draw_computing(axes, step, palette, computing_height)
    _draw_buckets(axes, step, palette)
    _name_rows(axes, step, computing_height)
    _mark_time(axes, step, palette)
    place_legend(axes, palette, num_columns=8)
    return to_png(figure)


def _draw_computing(axes: "Axes", step: TimedStep, palette: Palette, height: float) -> None:
    times = step.times
    waits = [(one.landed_s - one.waited_s, one.landed_s) for one in step.buckets]
    for spans, color, alpha, label in (
        ([(0.0, times.forward_ended_s)], palette.train, 0.45, "forward"),
        ([(times.backward_began_s, times.backward_ended_s)], palette.train, 0.9, "backward"),
        (step.optimizer_spans, palette.muted, 0.9, "optimizer"),
        (waits, palette.bad, 1.0, "waiting"),
    ):
        _draw(axes, spans, -0.9 * height, 0.8 * height, color, alpha, label)


def _draw_buckets(axes: "Axes", step: TimedStep, palette: Palette) -> None:
    for row, one in enumerate(step.buckets):
        labels = ("in the queue", "exchange") if row == 0 else ("", "")  # a legend names each colour once
        _draw(axes, [(one.ready_s, one.began_s)], row + 0.1, 0.8, palette.held_out, 0.25, labels[0])
        _draw(axes, [(one.began_s, one.ended_s)], row + 0.1, 0.8, palette.held_out, 1.0, labels[1])


def _name_rows(axes: "Axes", step: TimedStep, computing_height: float) -> None:
    every = 1 + len(step.buckets) // _MAX_LABELS
    named = list(enumerate(step.buckets))[every - 1 :: every]
    axes.set_yticks(
        [-0.5 * computing_height, *(row + 0.5 for row, _ in named)],
        ["computing", *(f"bucket {one.bucket}, {size(one.num_bytes)}" for _, one in named)],
    )
    axes.set_ylim(len(step.buckets), -computing_height)


def _mark_time(axes: "Axes", step: TimedStep, palette: Palette) -> None:
    from matplotlib.ticker import EngFormatter

    end_s = step.times.duration_s
    axes.axvline(1e3 * end_s, color=palette.muted, linestyle=(0, (3, 3)), linewidth=0.9, label="end of the step")
    first_s = min([0.0, *(one.ready_s for one in step.buckets)])
    last_s = max([end_s, 1e-6, *(one.landed_s for one in step.buckets)])
    margin_s = 0.01 * (last_s - first_s)
    axes.set_xlim(1e3 * (first_s - margin_s if first_s else 0.0), 1e3 * (last_s + margin_s))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("ms since forward began", color=palette.muted, fontsize=8.5, loc="right", labelpad=1)


def _draw(axes: "Axes", spans: list[Span], top: float, height: float, color: str, alpha: float, label: str) -> None:
    bars = [(1e3 * began_s, 1e3 * max(0.0, ended_s - began_s)) for began_s, ended_s in spans]
    axes.broken_barh(bars, (top, height), facecolor=color, alpha=alpha, linewidth=0, label=label)
