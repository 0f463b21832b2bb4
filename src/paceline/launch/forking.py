"""The process that workers are forked from: it imports torch and Paceline for all of them, once."""

import multiprocessing
import multiprocessing.forkserver
import sys
from typing import Literal

# torch imports its compiler with the first optimizer.
_PRELOADED = ["paceline.launch.worker", "torch._dynamo"]

START_METHOD: Literal["forkserver", "spawn"] = "forkserver" if sys.platform == "linux" else "spawn"
"""How workers are started: elsewhere than on Linux forks of torch are not safe."""


def prepare_to_fork() -> None:
    """Start that process, unless it runs; called before torch is imported here, both import it at the same time."""
    if START_METHOD == "forkserver":
        multiprocessing.set_forkserver_preload(_PRELOADED)
        multiprocessing.forkserver.ensure_running()
