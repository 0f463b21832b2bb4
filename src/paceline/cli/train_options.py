"""Options of `paceline train`."""

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import SettingsError

Recipe = Annotated[
    str | None,
    typer.Argument(help="A recipe's name (see `paceline recipes`), or your own: file.py:function."),
]
Workers = Annotated[
    int | None,
    typer.Option(help="Workers on this machine, one process each if no layout has more. [default: 2, or the layout's]"),
]
Out = Annotated[Path | None, typer.Option(help="Directory of the run; new without --go_on. [default: runs/RECIPE-n]")]
Resume = Annotated[Path | None, typer.Option(help="Directory of a run to resume.")]
Plan = Annotated[
    Path | None,
    typer.Option(
        help="File of `paceline plan`, with settings and workers, whose prediction is logged beside the steps; or "
        "auto: the recipe is first profiled here, and planned."
    ),
]
GoOn = Annotated[
    bool,
    typer.Option(
        "--go_on",
        "--go-on",
        help="Start the run in --out, or resume it if it exists; for cluster jobs that may be submitted again.",
    ),
]
MaxRestarts = Annotated[int, typer.Option(help="Losses of workers without progress before giving up.")]
MinWorkers = Annotated[
    int | None,
    typer.Option(
        "--min_workers",
        "--min-workers",
        help="Workers that must be left to go on without a restart from the checkpoint. [default: half of them]",
    ),
]
Spares = Annotated[
    int, typer.Option(help="Additional workers that wait, with the model in memory, to replace one that is lost.")
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS[:PORT]",
        help="Address of this machine at which `paceline agent` on other machines offers workers. [default: none]",
    ),
]
NoticeS = Annotated[
    float | None,
    typer.Option(
        "--notice_s",
        "--notice-s",
        help="Let a worker that gets SIGTERM leave within this time, and the others go on. [default: all stop]",
    ),
]
LauncherTimeoutS = Annotated[
    float,
    typer.Option(
        "--launcher_timeout_s",
        "--launcher-timeout-s",
        help="Time for which workers train on after this process was killed, for --resume to take them over; then they "
        "save and end.",
    ),
]
ScalePolicyName = Annotated[
    str | None,
    typer.Option(
        "--scale_policy",
        "--scale-policy",
        help="Function that says how many workers there should be: efficient, or file.py:function. [default: none]",
    ),
]
ScaleIntervalS = Annotated[
    float, typer.Option("--scale_interval_s", "--scale-interval-s", help="Time between two calls of it.")
]
Prices = Annotated[Path | None, typer.Option(help="JSON file of numbers for it, read anew for each call.")]


def check_numbers(
    max_restarts: int,
    min_workers: int | None,
    spares: int,
    notice_s: float | None,
    scale_interval_s: float,
    launcher_timeout_s: float,
) -> None:
    """Raise `SettingsError` for one that is out of range."""
    if max_restarts < 0:
        raise SettingsError(f"--max-restarts must be at least 0, but got {max_restarts}; 0 is for no restart")
    if min_workers is not None and min_workers < 1:
        raise SettingsError(f"--min_workers must be at least 1, but got {min_workers}; leave it out for half of them")
    if spares < 0:
        raise SettingsError(f"--spares must be at least 0, but got {spares}; 0 is for none")
    if notice_s is not None and not 0 < notice_s < math.inf:
        raise SettingsError(f"--notice_s must be more than 0 seconds, but got {notice_s}; leave it out for none")
    if not 0 <= launcher_timeout_s < math.inf:
        raise SettingsError(
            f"--launcher_timeout_s must be at least 0 seconds, but got {launcher_timeout_s}; 0 lets workers "
            "save and end at once"
        )
    if not 0 < scale_interval_s < math.inf:
        raise SettingsError(f"--scale_interval_s must be more than 0 seconds, but got {scale_interval_s}")


def parse_address(text: str, *, needs_port: bool = False) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; without a port that is 0.

    Raises:
        SettingsError: The text has another form.
    """
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", text)
    if found is None or not int(found[3] or 0) < 65536 or (needs_port and not found[3]):
        form = "HOST:PORT" if needs_port else "HOST or HOST:PORT"
        raise SettingsError(f"an address must be {form}, with brackets around IPv6, but got {text}; give one like that")
    return found[1] or found[2], int(found[3] or 0)
