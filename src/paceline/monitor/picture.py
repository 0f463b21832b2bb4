"""The picture of a run's curves, drawn with matplotlib."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.monitor.curves import Floats, as_floats, ratio_in_bins, smooth, thin
from paceline.monitor.events import Record, StalenessMeasured
from paceline.monitor.formatting import number, one_line, printable, workers
from paceline.monitor.plot_style import Palette, dress, make_figure, place_legend, to_png
from paceline.monitor.reader import RunSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(summary: RunSummary, palette: Palette, *, titled: bool) -> bytes:
    """Return a PNG of the curves.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = make_figure(11, 6.9 if titled else 6.3, palette)
    if titled:
        _write_title(figure, summary, palette)
    if summary.steps or summary.evaluations:
        _draw_panels(figure, summary, palette, top=0.84 if titled else 0.94)
    else:
        figure.text(0.5, 0.45, "no step has finished yet", color=palette.muted, ha="center", fontsize=13)
    return to_png(figure)


def _write_title(figure: "Figure", summary: RunSummary, palette: Palette) -> None:
    title, details = "a run", [str(summary.state)]
    if summary.starts:
        start = summary.starts[-1].event
        title = start.recipe
        details += [f"{start.num_parameters:,} parameters", workers(start)]
    for y, size, weight, color, text in (
        (0.945, 15, "bold", palette.ink, title),
        (0.908, 10, "normal", palette.muted, "  ·  ".join(details)),
    ):
        plain = one_line(printable(text), 70).encode("latin-1", "replace").decode("latin-1")  # within the font
        figure.text(0.055, y, plain, size=size, weight=weight, color=color, parse_math=False)


def _draw_panels(figure: "Figure", summary: RunSummary, palette: Palette, top: float) -> None:
    titles = ["loss", "learning rate", "samples per second", "communication, share of a step"]
    titles += ["workers' distance from their mean"] * bool(summary.distances)
    stale = [record for record in summary.staleness if record.event.mean is not None]
    titles += ["delay of gradients, in updates"] * bool(stale)
    num_columns = len(titles) - 1
    grid = figure.add_gridspec(
        2,
        num_columns,
        height_ratios=(1.75, 1),
        left=0.055,
        right=0.985,
        top=top,
        bottom=0.075,
        hspace=0.42,
        wspace=0.22,
    )
    axes = [figure.add_subplot(grid[0, :]), *(figure.add_subplot(grid[1, column]) for column in range(num_columns))]
    for one, title in zip(axes, titles, strict=True):
        dress(one, title, palette)
        _count_steps(one, palette)
    steps = np.array([record.step for record in summary.steps], dtype=np.float64)
    _draw_loss(axes[0], steps, summary, palette)
    if len(steps):
        _draw_learning_rate(axes[1], steps, summary, palette)
        _draw_speed(axes[2], steps, summary, palette)
        _draw_time(axes[3], steps, summary, palette)
    if summary.distances:
        apart = as_floats([record.event.distance for record in summary.distances])
        axes[4].plot(
            [record.step for record in summary.distances], apart, color=palette.train, linewidth=1.6, marker="o"
        )
        axes[4].set_ylim(bottom=0)
    if stale:
        _draw_staleness(axes[-1], stale, palette)
    all_steps = [*steps, *(record.step for record in summary.evaluations)]
    margin = max(0.5, 0.01 * (max(all_steps) - min(all_steps)))
    for one in axes:
        one.set_xlim(min(all_steps) - margin, max(all_steps) + margin)
        for resume in _resumes(summary):
            one.axvline(resume, color=palette.muted, linestyle=(0, (3, 3)), linewidth=0.9, zorder=1)


def _draw_staleness(axes: "Axes", stale: Sequence[Record[StalenessMeasured]], palette: Palette) -> None:
    at = [record.step for record in stale]
    dots = "o" if len(at) < 3 else ""
    means = as_floats([record.event.mean for record in stale])
    largest = as_floats([record.event.largest for record in stale])
    axes.plot(at, largest, color=palette.train, alpha=0.4, linewidth=1, marker=dots, label="largest")
    axes.plot(at, means, color=palette.train, linewidth=1.8, marker=dots, label="mean")
    axes.set_ylim(bottom=0)
    place_legend(axes, palette, 2)


def _resumes(summary: RunSummary) -> list[int]:
    """Return the steps at which training resumed from a checkpoint, or restarted."""
    later = {start.event.start_step for start in summary.starts[1:]}
    return sorted(later | {start.event.start_step for start in summary.starts if start.event.resumed_from})


def _count_steps(axes: "Axes", palette: Palette) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("step", color=palette.muted, fontsize=8.5, loc="right", labelpad=1)


def _draw_loss(axes: "Axes", steps: Floats, summary: RunSummary, palette: Palette) -> None:
    raw = as_floats([record.event.loss for record in summary.steps])
    smoothed = smooth(raw, max(1, len(raw) // 30))
    judged = as_floats([record.event.loss for record in summary.evaluations])
    dots = "o" if len(raw) < 3 else ""
    axes.plot(*thin(steps, raw), color=palette.train, alpha=0.25, linewidth=0.8, zorder=2)
    axes.plot(*thin(steps, smoothed), color=palette.train, linewidth=2, marker=dots, label="training", zorder=3)
    _draw_held_out(axes, summary, palette)
    bad = steps[~np.isfinite(raw)]
    if len(bad):
        label = f"not finite ({len(bad):,} steps)"
        where = axes.get_xaxis_transform()
        axes.plot(
            bad,
            np.full(len(bad), 0.03),
            "x",
            color=palette.bad,
            markersize=5,
            label=label,
            transform=where,
            zorder=5,
        )
    if _resumes(summary):
        axes.plot([], [], color=palette.muted, linestyle=(0, (3, 3)), linewidth=0.9, label="restart or resume")
    _fit(axes, raw, np.concatenate([smoothed, judged]))
    place_legend(axes, palette, num_columns=4)


def _draw_held_out(axes: "Axes", summary: RunSummary, palette: Palette) -> None:
    steps = [record.step for record in summary.evaluations]
    losses = as_floats([record.event.loss for record in summary.evaluations])
    known = losses[np.isfinite(losses)]
    if len(known):
        axes.plot(
            steps,
            losses,
            color=palette.held_out,
            linewidth=1.4,
            marker="o",
            markersize=5.5 if len(losses) <= 40 else 2.5,
            markeredgecolor=palette.paper,
            label=f"held out, last {number(known[-1])}",
            zorder=4,
        )


def _fit(axes: "Axes", raw: Floats, shown: Floats) -> None:
    """Choose the range of the loss so that one spike does not flatten everything else."""
    shown, raw = shown[np.isfinite(shown)], raw[np.isfinite(raw)]
    if not len(shown):
        axes.set_yticks([])
        return
    usual = np.quantile(raw, [0.005, 0.995]) if len(raw) else shown
    lowest, highest = min(shown.min(), usual.min()), max(shown.max(), usual.max())
    if lowest > 0 and highest > 100 * lowest:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.3, highest * 1.3)
        axes.minorticks_off()
        return
    pad = 0.06 * (highest - lowest) or 0.05 * abs(highest) or 1.0
    axes.set_ylim(lowest - pad, highest + pad)


def _draw_learning_rate(axes: "Axes", steps: Floats, summary: RunSummary, palette: Palette) -> None:
    from matplotlib.ticker import FuncFormatter

    rates = as_floats([record.event.learning_rate for record in summary.steps])
    axes.plot(*thin(steps, rates), color=palette.train, linewidth=1.8, marker="o" if len(rates) < 3 else "")
    known = rates[np.isfinite(rates)]
    if len(known) and known.min() >= 0 and known.max() > 0:
        axes.set_ylim(0, 1.15 * float(known.max()))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))


def _draw_speed(axes: "Axes", steps: Floats, summary: RunSummary, palette: Palette) -> None:
    from matplotlib.ticker import EngFormatter

    num_samples = as_floats([record.event.num_samples for record in summary.steps])
    duration_s = as_floats([record.event.duration_s for record in summary.steps])
    rates = np.full(len(steps), np.nan)
    np.divide(num_samples, duration_s, out=rates, where=duration_s > 0)
    usual = smooth(rates, max(1, len(rates) // 30))
    axes.plot(*thin(steps, rates), color=palette.train, alpha=0.25, linewidth=0.8)
    axes.plot(*thin(steps, usual), color=palette.train, linewidth=1.8, marker="o" if len(rates) < 3 else "")
    known = rates[np.isfinite(rates)]
    if len(known):
        axes.set_ylim(0, max(1.15 * float(np.quantile(known, 0.98)), 1e-9))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_time(axes: "Axes", steps: Floats, summary: RunSummary, palette: Palette) -> None:
    from matplotlib.ticker import PercentFormatter

    duration_s = as_floats([record.event.duration_s for record in summary.steps])
    communication_s = as_floats([record.event.communication_s for record in summary.steps])
    at, shares = ratio_in_bins(steps, communication_s, duration_s)
    at, shares = np.append(at, steps[-1] + 1) - 0.5, np.clip(np.append(shares, shares[-1]), 0, 1)
    known = np.isfinite(shares)
    for alpha, low, high in ((0.85, 0.0, shares), (0.16, shares, 1.0)):
        axes.fill_between(at, low, high, where=known, step="post", color=palette.train, alpha=alpha, linewidth=0)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
