"""A process that has imported torch already and forks a starter of ranks whenever one is asked for.

Importing torch and Paceline takes longer than most tests of processes do, so the tests of one process share one import.
What is forked has a fresh session, the caller's environment and directory, and no module that only a test needs. The
process ends when its owner closes its pipe, and so when the owner dies.
"""

import atexit
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PRELOADED = ("paceline.training", "paceline.recipes.transformer_lm", "paceline.testing")
_POLL_S = 0.005


class WarmStarter:
    """The owner's end of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from paceline.testing.warm_starter import serve; serve()"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )

    def run(self, plan: Mapping[str, Any], environment: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
        """Let a fork of it carry out a plan; return the exit code and all that the fork wrote.

        Raises:
            RuntimeError: It died.
            TimeoutError: The fork was not done in time; it is killed.
        """
        assert self._process.stdin is not None
        request = {"plan": plan, "environment": dict(environment), "directory": os.getcwd()}
        output = Path(plan["folder"]) / "starter.output"
        pid = None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            deadline_s = time.monotonic() + timeout_s
            pid = self._read(deadline_s)
            code = self._read(deadline_s)
        except BaseException:
            if pid is not None:
                os.killpg(pid, signal.SIGKILL)
            self.close()
            raise
        return code, output.read_text(errors="replace")

    def _read(self, deadline_s: float) -> int:
        """Return the next number that it says."""
        assert self._process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise TimeoutError("the process that starts ranks must end in time, but it did not")
            read = self._process.stdout.read(1)
            if not read:
                raise RuntimeError("the process that starts ranks must live as long as its owner, but it died")
            line += read
        return int(line)

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.kill()
        self._process.wait()


_starter: WarmStarter | None = None


def share_starter() -> WarmStarter:
    """Return the one of this process, made if there is none that lives."""
    global _starter
    if _starter is None or not _starter.is_alive:
        _starter = WarmStarter()
        atexit.register(_starter.close)
    return _starter


def serve() -> None:
    """Be the process: fork for each request, and say the fork's process id, then its exit code."""
    from paceline.testing.processes import start_ranks

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner
    _import_ahead()
    while line := sys.stdin.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(request, start_ranks)
        _say(pid)
        code = _wait(pid)
        _say(code)


def _import_ahead() -> None:
    import torch

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # torch imports a third of itself with the first optimizer
    for name in _PRELOADED:
        importlib.import_module(name)


def _say(number: int) -> None:
    os.write(1, b"%d\n" % number)


def _wait(pid: int) -> int:
    """Return the exit code of the fork; where the owner goes first, end both."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if select.select([0], [], [], _POLL_S)[0]:
            os.kill(pid, signal.SIGTERM)  # it cleans up
            sys.exit()


def _become(request: Mapping[str, Any], start_ranks: Callable[[Mapping[str, Any]], None]) -> None:
    """Carry out the plan as if this process had been started for it alone; never return."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, file, flags in ((0, os.devnull, os.O_RDONLY), (1, "starter.output", os.O_WRONLY | os.O_CREAT)):
            os.dup2(os.open(Path(request["plan"]["folder"], file), flags), target)
        os.dup2(1, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        start_ranks({**request["plan"], "owner": os.getppid()})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
