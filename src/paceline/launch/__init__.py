"""Layer 8: how workers are started, restarted and stopped."""

from paceline.launch.exit_codes import ExitCode
from paceline.launch.local import launch
from paceline.launch.worker import load_run, work

__all__ = ["ExitCode", "launch", "load_run", "work"]
