"""The `paceline` command."""

import importlib.metadata
import os
import sys
import warnings
from typing import Annotated

import typer
from pydantic import ValidationError

import paceline
from paceline.cli import bench, checkpoint, compare, data, reproduce, simulate, verify
from paceline.cli.agent import agent
from paceline.cli.clusters import clusters
from paceline.cli.evaluate import evaluate, find_trained
from paceline.cli.export import export
from paceline.cli.memory import memory
from paceline.cli.overrides_command import OverridesCommand
from paceline.cli.plan import plan
from paceline.cli.prices import prices
from paceline.cli.profile import profile
from paceline.cli.recipes import find_run, recipes
from paceline.cli.report import report
from paceline.cli.scale import ScaleCommand, scale
from paceline.cli.trace import trace
from paceline.cli.train import train
from paceline.errors import PacelineError
from paceline.launch.exit_codes import find_exit_code
from paceline.registry import explain

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_versions(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"paceline {paceline.__version__}, torch {importlib.metadata.version('torch')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_versions, is_eager=True, help="Show versions and end.")
    ] = False,
) -> None:
    """Train any PyTorch model across whatever machines you have."""


app.command(cls=OverridesCommand.of(find_run))(train)
app.command(cls=ScaleCommand)(scale)
app.command()(agent)
app.command()(report)
app.command()(trace)
app.command(cls=OverridesCommand.of(find_trained))(evaluate)
app.command()(export)
for module, command in (
    (bench, bench.bench),
    (compare, compare.compare),
    (reproduce, reproduce.reproduce),
    (verify, verify.verify),
    (simulate, simulate.simulate),
):
    app.command(cls=OverridesCommand.of(module.find_settings))(command)
app.command(cls=OverridesCommand.of(find_run))(memory)
app.command(cls=OverridesCommand.of(find_run))(plan)
app.command(cls=OverridesCommand.of(find_run))(profile)
app.command()(recipes)
app.command()(clusters)
app.command()(prices)
app.add_typer(checkpoint.commands, name="checkpoint")
app.add_typer(data.commands, name="data")


_format_with_line = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning of Paceline's as its sentence alone; others with the line that they come from."""
    if category.__module__.startswith("paceline."):
        return f"warning: {category.__name__}: {message}\n"
    return _format_with_line(message, category, filename, lineno, line)


def _open_closed_streams() -> None:
    """Open standard streams that were closed (``>&-``), or their numbers would be those of later files and sockets."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it takes the lowest number that is free


def main() -> None:
    """Run the command line; an error of Paceline's is one message, and bad input is exit code 2.

    An error in the user's own code begins with its line.
    """
    # Torch, which is imported afterwards, would print native stack traces wherever another process is lost, and warn of
    # addresses without names, which hosts of a netlab have.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _open_closed_streams()
    warnings.formatwarning = _format_warning
    try:
        app()
    except Exception as error:
        from paceline.monitor.user_code import find_user_line, format_user_traceback

        place = find_user_line(error)
        where = f"{place}: " if place else ""
        if isinstance(error, PacelineError | ValidationError):
            what = explain(error) if isinstance(error, ValidationError) else str(error)
            typer.secho(f"paceline: {where}{what}", err=True, fg="red")
            sys.exit(find_exit_code(type(error)))
        if not place:  # ours
            raise
        typer.secho(f"{where}{type(error).__name__}: {error}", err=True, fg="red")
        typer.echo(format_user_traceback(error), err=True, nl=False)
        sys.exit(1)
