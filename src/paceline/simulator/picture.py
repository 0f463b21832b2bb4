"""The picture of scaling curves, drawn with matplotlib."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.errors import SettingsError
from paceline.monitor.plot_style import LIGHT, Palette, dress, make_figure
from paceline.simulator.scaling import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg")
_COLOURS = ("#3f57d6", "#e06a10", "#1f9d6b", "#b0389b", "#8a6d1d", "#2196b8", "#687083", "#cf2f3f")
_STYLES = ("-", "--", ":")


Point = tuple[float, ...]
"""Number of ranks and efficiency; perhaps the ends of its interval."""


def draw_scaling(predictions: Sequence[Prediction], title: str, file_format: str, palette: Palette = LIGHT) -> bytes:
    """Return a picture: one panel for each bandwidth, efficiency over ranks, one line for each algorithm.

    Args:
        predictions: Points of the curves.
        title: One line above the panels.
        file_format: One of `FORMATS`.
        palette: Colours of the picture.

    Raises:
        SettingsError: The format is unknown.
        MissingExtraError: matplotlib is not installed.
    """
    panels: dict[str, dict[str, list[Point]]] = {}
    for bandwidth in sorted({point.bandwidth_bytes_per_s for point in predictions}):
        curves = panels.setdefault(f"{8e-9 * bandwidth:.4g} Gb/s", {})
        for point in predictions:
            if point.bandwidth_bytes_per_s == bandwidth:
                curves.setdefault(point.algorithm, []).append((point.num_ranks, point.efficiency))
    return draw_curves(panels, title, file_format, palette)


def draw_curves(
    panels: Mapping[str, Mapping[str, Sequence[Point]]], title: str, file_format: str, palette: Palette = LIGHT
) -> bytes:
    """Return a picture of efficiency over ranks: curves by name, in panels by title; see `draw_scaling`."""
    if file_format not in FORMATS:
        raise SettingsError(
            f"a picture's format must be one of {', '.join(FORMATS)}, but got {file_format!r}; choose one"
        )
    figure = make_figure(max(6.5, 1.2 + 3.6 * len(panels)), 4.4, palette)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, curves) in zip(all_axes, panels.items(), strict=True):
        _draw_panel(axes, name, curves, palette)
    all_axes[0].set_ylabel("scaling efficiency", color=palette.muted, fontsize=8.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=palette.ink, parse_math=False)
    lines, names = all_axes[0].get_legend_handles_labels()
    columns = min(len(names), 8)
    figure.legend(lines, names, loc="lower left", ncols=columns, frameon=False, fontsize=8.5, labelcolor=palette.muted)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    buffer = io.BytesIO()
    # Without a date the same curves are the same file.
    figure.savefig(buffer, format=file_format, dpi=160, metadata={"Date": None} if file_format == "svg" else None)
    return buffer.getvalue()


def _draw_panel(axes: "Axes", title: str, curves: Mapping[str, Sequence[Point]], palette: Palette) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, StrMethodFormatter

    dress(axes, title, palette)
    for number, (name, points) in enumerate(curves.items()):
        ranks, efficiencies, *ends = zip(*points, strict=True) if points else ((), ())
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(
            ranks,
            efficiencies,
            color=colour,
            linestyle=_STYLES[number // len(_COLOURS) % len(_STYLES)],
            linewidth=1.6 + 0.55 * (len(curves) - 1 - number),  # curves often coincide: lower ones show at the edges
            marker="o" if len(points) == 1 else "",
            solid_capstyle="round",
            label=name,
        )
        if ends:
            low, high = ends
            axes.fill_between(ranks, low, high, color=colour, alpha=0.15, linewidth=0)
    shown = sorted({point[0] for points in curves.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(shown[:: max(1, -(-len(shown) // 6))]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.set_xlabel("ranks", color=palette.muted, fontsize=8.5, loc="right", labelpad=1)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
