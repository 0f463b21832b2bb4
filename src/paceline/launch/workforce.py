"""Workers of this machine as a supervisor's processes, forked from one that has imported torch for them."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from paceline.comm.control import ControlAccess
from paceline.comm.stacks import ask_for_line, has_ended, is_stopped
from paceline.elastic.facts import End, host_of
from paceline.elastic.protocol import Coordinator
from paceline.elastic.supervisor import Workforce
from paceline.launch.exit_codes import ExitCode
from paceline.launch.forking import START_METHOD, find_end, find_server, prepare_to_fork
from paceline.launch.launcher_watch import RECORD
from paceline.launch.left_run import LeftProcess
from paceline.launch.processes import GRACE_S, Ended, describe_exit, make_environment, prepare_rank
from paceline.launch.signals import STOP_SIGNALS
from paceline.launch.starting import StartingProcess

_ENDS: dict[int, End] = {
    ExitCode.FINISHED: "done",
    ExitCode.PREEMPTED: "done",
    ExitCode.BUDGET_SPENT: "done",
    ExitCode.PEERS_LOST: "gave_up",
    ExitCode.FAILED: "failed",
    ExitCode.REFUSED: "failed",
    -signal.SIGABRT: "gave_up",  # native code that aborts may do so again: gloo does where ranks differ
}


_UNKNOWN_CODE = 255
"""Exit code that multiprocessing tells of a worker that lives, once the process that it was forked from is gone."""
_SERVER_ENDS_S = 1.0
"""Longest time between the two."""
_START_S = 1.0
"""Longest time that the caller waits for a start; it goes on by itself."""
_LOOK_S = 0.02
"""Time between two looks at starts."""
_ANSWER_S, _STOPPED_S = 60.0, 2.0
"""Times after which people are told of a start, and of one by a process that is stopped."""


class LocalWorkforce(Workforce):
    """Processes of this machine, which run ``function(directory, epoch, name)``.

    Args:
        function: Function of each process, at the top of a module.
        directory: Directory of the run; what they print lies in its folder ``workers``, by slot.
        size: Number of workers at the beginning.
        access: Access to the store.
        address: Address of this machine for connections to workers on others; empty if there are no others.
        stop_signal: Signal that they are sent for SIGTERM.
    """

    def __init__(
        self,
        function: Callable[[Path, int, str], None],
        directory: Path,
        size: int,
        access: ControlAccess,
        *,
        address: str = "",
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        prepare_to_fork()
        self._server = find_server()
        """Number of the process that workers are forked from."""
        self._news: list[str] = []
        self._context: Any = multiprocessing.get_context(START_METHOD)
        self._function, self._directory = function, directory
        self._size, self._access, self._address = size, access, address
        self._stop_signal = stop_signal
        self._running: dict[str, BaseProcess | LeftProcess | StartingProcess] = {}
        self._slots: dict[str, int] = {}
        self.ended = Ended()
        """Ends of processes of the present start of all, by slot, but for those that were replaced."""
        self.tell_asked: Callable[[int], None] = lambda _: None
        """Function that is told the signal that asked one worker, and so all, to stop, and ended that one: it was just
        being started, and could not tell the others."""
        self._is_asked = False
        """Whether a signal was sent to them from here."""

    def start(self, name: str, slot: int, epoch: int) -> None:
        """Fork it, unless it was taken over; its process number is written to ``NAME.pid`` for people.

        Where the process that forks does not answer soon, the start goes on by itself, and `wait` looks after it.
        """
        if name in self._running:
            return
        output = self._directory / "workers"
        with contextlib.suppress(OSError):  # a full disk, on which somebody has removed the folder too
            output.mkdir(exist_ok=True)
        environment = make_environment(slot, self._size, self._access, self._address)
        arguments = (environment, output, self._function, (self._directory, epoch, name))
        self._replace_server()
        make = partial(self._context.Process, target=_be_worker, args=arguments, name=name)
        starting = StartingProcess(make, self._server)
        self._running[name], self._slots[name] = starting, slot
        self.ended.exit_codes.pop(slot, None)
        self.ended.ended_here.discard(slot)
        if not is_stopped(self._server):
            starting.join(_START_S)
        self._look_after_starts()

    def _look_after_starts(self) -> bool:
        """Take in processes that have started since, and return whether others have not."""
        is_starting = False
        for name, starting in list(self._running.items()):
            if not isinstance(starting, StartingProcess) or starting.exitcode is not None:
                continue
            try:
                process = starting.find()
            except (OSError, EOFError):
                if starting.server == self._server and not self._replace_server(within_s=_SERVER_ENDS_S):
                    raise
                self._running[name] = again = StartingProcess(starting.make, self._server)
                again.signals, process = starting.signals, None
            if process is None:
                is_starting = True
                self._tell_late(name, starting)
                continue
            self._running[name] = process
            for number in starting.signals:  # those that came up to now; later ones reach the process
                _send(process.pid, number)
            with contextlib.suppress(OSError):  # a full disk
                (self._directory / "workers" / f"{name}.pid").write_text(f"{process.pid}\n")
        return is_starting

    def _tell_late(self, name: str, starting: StartingProcess) -> None:
        took_s, stopped = time.monotonic() - starting.began_s, is_stopped(self._server)
        if not starting.is_told and took_s > (_STOPPED_S if stopped else _ANSWER_S):
            starting.is_told = True
            self._news.append(
                f"{name} is being started, but the process that workers are forked from (multiprocessing.forkserver, "
                f"pid {self._server}) has not answered for {took_s:.0f} s"
                + (": it is stopped, as by SIGSTOP" if stopped else "")
                + "; workers that train go on meanwhile"
            )

    def _replace_server(self, within_s: float = 0.0) -> bool:
        """Return whether the process that workers are forked from has ended, or does so in time; start it again then.

        Workers live on, as processes that say themselves how they have ended.
        """
        deadline_s = time.monotonic() + within_s
        while not (end := find_end(self._server)):
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.01)
        kept = []
        for name, process in self._running.items():
            if isinstance(process, BaseProcess) and process.exitcode in (None, _UNKNOWN_CODE):
                self._ask_itself(name, process)
                kept.append(name)
        self._news.append(
            f"the process that workers are forked from (multiprocessing.forkserver, pid {self._server}) {end}; another "
            "one is started" + (f", and {', '.join(kept)} train on" if kept else "")
        )
        prepare_to_fork()
        self._server = find_server()
        return True

    def _ask_itself(self, name: str, process: BaseProcess) -> None:
        """Learn how a worker ends from what it writes down itself."""
        output = self._directory / "workers"
        self._running[name] = LeftProcess(output / f"{name}{RECORD}", output / f"rank{self._slots[name]}.err", process)

    def read_news(self) -> list[str]:
        """Return, in words, what the process that workers are forked from has met with."""
        news, self._news = self._news, []
        return news

    def take_over(self, coordinator: Coordinator) -> None:
        """Make the processes that another launcher has left this one's, if they exist or have said anything."""
        output = self._directory / "workers"
        for name, worker in coordinator.workers.items():
            record = output / f"{name}{RECORD}"
            if not host_of(name) and (worker.is_ready or record.exists()):
                self._slots[name] = worker.slot
                self._running[name] = LeftProcess(record, output / f"rank{worker.slot}.err")

    def forget(self, name: str) -> None:
        """Remove what it has written down of itself."""
        (self._directory / "workers" / f"{name}{RECORD}").unlink(missing_ok=True)

    def kill(self, name: str) -> None:
        """Send it SIGKILL."""
        if name in self._running:
            self.ended.ended_here.add(self._slots[name])
            self._running[name].kill()

    def locate(self, name: str) -> str:
        """Ask it for its stacks, which lie beside its output then."""
        path, process = self._directory / "workers" / f"rank{self._slots[name]}.stack", self._running[name]
        if isinstance(process, StartingProcess):
            return f", since process {self._server}, which forks it, has not answered"
        if process.pid is not None and is_stopped(process.pid):
            return f" (pid {process.pid}), stopped, as by SIGSTOP"
        line = ask_for_line(process.pid or 0, str(path), is_reading=False)
        return f" (pid {process.pid}), at {line}; stacks are in {path}" if line else f" (pid {process.pid})"

    def wait(self, timeout_s: float) -> list[tuple[str, End, str]]:
        """Wait for any of them."""
        is_starting, running = self._look_after_starts(), self._running.values()
        sentinels = [process.sentinel for process in running if not isinstance(process, StartingProcess)]
        wait(sentinels, min(timeout_s, _LOOK_S) if is_starting else timeout_s)
        if is_stopped(self._server):  # which alone is told how they end
            for name, process in self._running.items():
                if isinstance(process, BaseProcess) and process.pid is not None and has_ended(process.pid):
                    self._ask_itself(name, process)
        codes = [process.exitcode for process in self._running.values()]
        self._replace_server(within_s=_SERVER_ENDS_S if _UNKNOWN_CODE in codes else 0.0)
        ended = [(name, process.exitcode) for name, process in self._running.items() if process.exitcode is not None]
        found = []
        for name, code in ended:
            self._running.pop(name).close()
            (self._directory / "workers" / f"{name}.pid").unlink(missing_ok=True)
            self.ended.exit_codes[self._slots[name]] = code
            is_asked = -code in STOP_SIGNALS and (self._stop_signal == signal.SIGTERM or -code != signal.SIGTERM)
            if is_asked and not self._is_asked and self._slots[name] not in self.ended.ended_here:
                self.tell_asked(-code)
            found.append((name, _ENDS.get(code, "killed"), describe_exit(name, code, self._directory)))
        return found

    def end_all(self) -> None:
        """Send SIGTERM, and SIGKILL to those that live on for long."""
        self.ended.ended_here |= {self._slots[name] for name in self._running}
        self.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + GRACE_S
        while self._running and (left_s := deadline_s - time.monotonic()) > 0:
            self.wait(left_s)
        self.kill_all()

    @property
    def is_running(self) -> bool:
        """Whether any process has not ended, as far as `wait` has found."""
        return bool(self._running)

    def kill_all_running(self) -> None:
        """Send SIGKILL to all."""
        for name in self._running:
            self.kill(name)

    def kill_all(self) -> None:
        """Send SIGKILL to all, and wait for them."""
        self.kill_all_running()
        while self._running:
            self.wait(1.0)

    def begin_again(self) -> None:
        """Forget how processes ended."""
        self.ended, self._is_asked = Ended(), False

    def signal(self, number: int) -> None:
        """Send a signal to all. It may be called in a handler: to ask how they are would disturb who asks now."""
        self._is_asked = True
        number = self._stop_signal if number == signal.SIGTERM else number
        for process in list(self._running.values()):
            if isinstance(process, StartingProcess):
                process.signals.append(number)
            else:
                _send(process.pid, number)


def _send(pid: int | None, number: int) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _be_worker(
    environment: dict[str, str], output: Path, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    prepare_rank(environment, output)
    function(*arguments)
