"""The picture of losses against wall clock, drawn with matplotlib."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.monitor.plot_style import LIGHT, Palette, dress, make_figure

_COLOURS = ("#687083", "#e06a10", "#3f57d6", "#1f9d6b")


@dataclass(frozen=True)
class Curve:
    """A line of the picture: seconds (or what else losses are over), and losses."""

    name: str
    points: Sequence[tuple[float, float]]


def draw_losses(
    panels: Mapping[str, Sequence[Curve]], file_format: str, palette: Palette = LIGHT, *, x_label: str = "seconds"
) -> bytes:
    """Return a picture: one panel for each title, losses over seconds, one line for each curve.

    Args:
        panels: Curves by title.
        file_format: png or svg.
        palette: Colours of the picture.
        x_label: Label of the horizontal axis, if not seconds.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = make_figure(1.2 + 4.4 * len(panels), 4.2, palette)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
        dress(axes, title, palette)
        for number, curve in enumerate(curves):
            times, losses = zip(*curve.points, strict=True)
            axes.plot(times, losses, color=_COLOURS[number % len(_COLOURS)], linewidth=1.8, label=curve.name)
        axes.set_xlabel(x_label, color=palette.muted, fontsize=8.5, loc="right", labelpad=1)
    all_axes[0].set_ylabel("training loss", color=palette.muted, fontsize=8.5)
    lines, names = all_axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="lower left", ncols=4, frameon=False, fontsize=8.5, labelcolor=palette.muted)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    buffer = io.BytesIO()
    # Without a date the same curves are the same file.
    figure.savefig(buffer, format=file_format, dpi=160, metadata={"Date": None} if file_format == "svg" else None)
    return buffer.getvalue()
