"""`paceline scale`: change the workers of a run while it trains."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from paceline.errors import SettingsError


class ScaleCommand(TyperCommand):
    """The command, to which -3 is a number of workers, which is refused as such, and no option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Hand numbers on as arguments, but for those that are an option's value."""
        numbers = [
            number
            for before, number in zip(["", *args], args, strict=False)
            if re.fullmatch(r"-\d+", number) and not before.startswith("--")
        ]
        return super().parse_args(ctx, [*(one for one in args if one not in numbers), "--", *numbers])


def scale(
    run: Annotated[Path, typer.Argument(help="Directory of a run that trains on this machine.")],
    workers: Annotated[int | None, typer.Argument(help="Number of workers from now on.")] = None,
    leave: Annotated[
        str | None, typer.Option(help="Name of a worker, such as w1, that leaves; another one takes its place.")
    ] = None,
    within_s: Annotated[
        float | None,
        typer.Option("--within_s", "--within-s", help="With --leave: time after which the worker is ended anyway."),
    ] = None,
) -> None:
    """Change the number of workers of a run while it trains.

    Workers join and leave at a step boundary: a new one is started at once, and taken in when it is ready. Global
    batch, learning rate and the order of samples stay the same. Runs that cannot change their workers refuse, and say
    why: stop them, and resume them with `--workers`. Without a number it says which workers train now.
    """
    from paceline.elastic.requests import ask, describe_workers

    if workers is not None and leave is not None:
        raise SettingsError(f"a number of workers or --leave must be given, but got {workers} and {leave}; choose one")
    if workers is not None and workers < 1:
        raise SettingsError(f"the number of workers must be at least 1, but got {workers}; choose another")
    if within_s is not None and leave is None:
        raise SettingsError(f"--within_s must be given with --leave, but got {within_s} alone; name a worker")
    if workers is None and leave is None:
        typer.echo(describe_workers(run))
        return
    ask(run, {"target": workers} if leave is None else {"leave": leave, "within_s": within_s})
    what = f"{leave} leaves" if leave is not None else f"{workers} worker{'' if workers == 1 else 's'}"
    typer.echo(f"{run}: {what} from a step boundary on")
