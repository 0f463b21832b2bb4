"""`paceline scale`: change the workers of a run while it trains."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import SettingsError


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
    if within_s is not None and leave is None:
        raise SettingsError(f"--within_s must be given with --leave, but got {within_s} alone; name a worker")
    if workers is None and leave is None:
        typer.echo(describe_workers(run))
        return
    ask(run, {"target": workers} if leave is None else {"leave": leave, "within_s": within_s})
    typer.echo(f"{run}: {f'{workers} workers' if leave is None else f'{leave} leaves'} from a step boundary on")
