"""Layer 10: how workers are started, restarted and stopped."""

from paceline.launch.exit_codes import ExitCode

__all__ = ["ExitCode"]
