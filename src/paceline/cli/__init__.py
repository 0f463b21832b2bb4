"""Layer 10: the command line, one file a command."""

from paceline.cli.main import main

__all__ = ["main"]
