"""The common style of all pictures: colours, figures and axes."""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.errors import missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Palette:
    """Colours of a picture."""

    paper: str
    ink: str
    muted: str
    grid: str
    train: str
    held_out: str
    bad: str


LIGHT = Palette(
    paper="#ffffff",
    ink="#1b2130",
    muted="#687083",
    grid="#e8eaef",
    train="#3f57d6",
    held_out="#e06a10",
    bad="#cf2f3f",
)
DARK = Palette(
    paper="#171b24",
    ink="#e8ebf2",
    muted="#98a1b3",
    grid="#2a303d",
    train="#8ea0ff",
    held_out="#ffab5e",
    bad="#ff7a85",
)


def make_figure(width: float, height: float, palette: Palette) -> "Figure":
    """Return an empty figure, in inches, that touches no global state of matplotlib.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "report", "a report") from error
    return Figure(figsize=(width, height), facecolor=palette.paper)


def to_png(figure: "Figure") -> bytes:
    """Return the figure as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


def dress(axes: "Axes", title: str, palette: Palette, *, grid: Literal["x", "y"] = "y") -> None:
    """Give axes their title and colours, and grid lines for the axis `grid`."""
    axes.set_facecolor(palette.paper)
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=palette.ink, pad=9)
    axes.grid(axis=grid, color=palette.grid, linewidth=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(palette.grid)
    axes.tick_params(colors=palette.muted, labelsize=8.5, length=0, pad=5)


def place_legend(axes: "Axes", palette: Palette, num_columns: int) -> None:
    """Put the legend beside the title, where no curve can cross it."""
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.985),
        frameon=False,
        fontsize=8.5,
        labelcolor=palette.muted,
        ncols=num_columns,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.2,
        borderaxespad=0.2,
    )
