"""Layer 11: the command line, one file per command."""

from paceline.cli.main import main

__all__ = ["main"]
