"""`paceline` in a process that is forked from one that has imported torch: nearly all of what starting one takes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path

from paceline.launch import forking


class ForkedLauncher:
    """A process that runs `paceline`, used as one of `subprocess.Popen` is.

    The process that its workers are forked from is its own, as always, but forked from it. It writes no report of the
    run, which takes seconds.

    Args:
        arguments: Arguments after ``paceline``.
        output: Path of the file for what it prints.
    """

    def __init__(self, arguments: Sequence[object], output: Path) -> None:
        forking.prepare_to_fork()
        output.touch()
        self._process = multiprocessing.get_context("forkserver").Process(
            target=be_launcher,
            args=(str(output), dict(os.environ), [str(argument) for argument in arguments]),
            daemon=True,  # it must not outlive the tests
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid, self._output = self._process.pid, output

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("paceline", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self._output.read_text(errors="replace"), None


def be_launcher(output: str, environment: dict[str, str], arguments: list[str]) -> None:
    """Run `paceline` in this process."""
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    multiprocessing.current_process().daemon = False  # it has children
    util.spawnv_passfds = fork_server
    forking.unblock_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from paceline.cli import main, prepare

    prepare.write_report = lambda directory: None
    sys.argv = ["paceline", *arguments]
    main()


def fork_server(path: str, words: Sequence[str], descriptors: Sequence[int]) -> int:
    """Do in a fork what a new interpreter is asked to do, with nothing open but what it is given."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *descriptors}:
            os.dup2(nothing, number)  # it stays taken: an object that had it open may close it later
        exec(words[-1], {})
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
