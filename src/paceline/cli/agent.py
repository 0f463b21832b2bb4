"""`paceline agent`: offer workers of this machine to a run on another one."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.train_options import parse_address
from paceline.errors import SettingsError
from paceline.launch import ExitCode
from paceline.launch.forking import prepare_to_fork
from paceline.launch.imports import without_collections
from paceline.launch.signals import leaving_when_asked


def agent(
    address: Annotated[
        str, typer.Argument(help="Address of the launcher, HOST:PORT, as paceline train --listen says.")
    ],
    token_file: Annotated[
        Path,
        typer.Option(
            "--token_file", "--token-file", help="Copy of the run's workers/control.json, readable by its owner alone."
        ),
    ],
    workers: Annotated[int, typer.Option(help="Workers on this machine.")] = 1,
    name: Annotated[str | None, typer.Option(help="Name of this machine in events. [default: its host name]")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for what workers here print. [default: runs/agent-NAME]")
    ] = None,
    notice_s: Annotated[
        float, typer.Option("--notice_s", "--notice-s", help="Time to leave in, after SIGTERM or Ctrl-C.")
    ] = 25.0,
) -> None:
    """Offer workers of this machine to a run that `paceline train --listen` trains on another one.

    They join at the next step boundary, and are replaced here if they die. SIGTERM or Ctrl-C lets them leave at a step
    boundary, while the others go on. Code and data must lie under the same paths as there.

    Exit codes: 0 the run is over, or the workers have left; 2 refused, and the message says why; 69 the launcher is
    lost, so that a new start can go on.
    """
    host, port = parse_address(address, needs_port=True)
    if workers < 1:
        raise SettingsError(f"--workers must be at least 1, but got {workers}")
    if not notice_s >= 0:
        raise SettingsError(f"--notice_s must be at least 0 seconds, but got {notice_s}")
    with leaving_when_asked(ExitCode.PREEMPTED):
        prepare_to_fork()
        with without_collections():
            from paceline.comm.control import ControlAccess
            from paceline.launch.agent import serve_launcher

        access = ControlAccess(host, port, ControlAccess.load(token_file).token)
        raise typer.Exit(
            serve_launcher(access, workers, name=name, out=out, notice_s=notice_s, tell=lambda words: typer.echo(words))
        )
