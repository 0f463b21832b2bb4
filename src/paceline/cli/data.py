"""`paceline data`: commands on training data."""

import typer

from paceline.cli.data_order import order
from paceline.cli.overrides_command import OverridesCommand
from paceline.cli.recipes import find_run

commands = typer.Typer(no_args_is_help=True, help="Look at training data.")
commands.command(cls=OverridesCommand.of(find_run))(order)
