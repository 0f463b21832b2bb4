"""The picture of scaling curves, drawn with matplotlib."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import SettingsError
from paceline.monitor.plot_style import LIGHT, Palette, dress, make_figure
from paceline.simulator.scaling import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg")
_COLOURS = ("#3f57d6", "#e06a10", "#1f9d6b", "#b0389b", "#8a6d1d", "#2196b8", "#687083", "#cf2f3f")
_STYLES = ("-", "--", ":")


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
    if file_format not in FORMATS:
        raise SettingsError(
            f"a picture's format must be one of {', '.join(FORMATS)}, but got {file_format!r}; choose one"
        )
    bandwidths = sorted({point.bandwidth_bytes_per_s for point in predictions})
    figure = make_figure(max(6.5, 1.2 + 3.6 * len(bandwidths)), 4.4, palette)
    panels = figure.subplots(1, len(bandwidths), sharey=True, squeeze=False)[0]
    for axes, bandwidth in zip(panels, bandwidths, strict=True):
        points = [point for point in predictions if point.bandwidth_bytes_per_s == bandwidth]
        _draw_panel(axes, f"{8e-9 * bandwidth:.4g} Gb/s", points, palette)
    panels[0].set_ylabel("scaling efficiency", color=palette.muted, fontsize=8.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=palette.ink, parse_math=False)
    lines, names = panels[0].get_legend_handles_labels()
    columns = min(len(names), 8)
    figure.legend(lines, names, loc="lower left", ncols=columns, frameon=False, fontsize=8.5, labelcolor=palette.muted)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    buffer = io.BytesIO()
    # Without a date the same curves are the same file.
    figure.savefig(buffer, format=file_format, dpi=160, metadata={"Date": None} if file_format == "svg" else None)
    return buffer.getvalue()


def _draw_panel(axes: "Axes", title: str, points: Sequence[Prediction], palette: Palette) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, StrMethodFormatter

    dress(axes, title, palette)
    names = list(dict.fromkeys(point.algorithm for point in points))
    for number, algorithm in enumerate(names):
        of_algorithm = [point for point in points if point.algorithm == algorithm]
        axes.plot(
            [point.num_ranks for point in of_algorithm],
            [point.efficiency for point in of_algorithm],
            color=_COLOURS[number % len(_COLOURS)],
            linestyle=_STYLES[number // len(_COLOURS) % len(_STYLES)],
            linewidth=1.6 + 0.55 * (len(names) - 1 - number),  # curves often coincide: lower ones show at the edges
            marker="o" if len(of_algorithm) == 1 else "",
            solid_capstyle="round",
            label=algorithm,
        )
    shown = sorted({point.num_ranks for point in points})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(shown[:: -(-len(shown) // 6)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.set_xlabel("ranks", color=palette.muted, fontsize=8.5, loc="right", labelpad=1)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
