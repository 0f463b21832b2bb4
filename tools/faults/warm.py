"""A warm process: it has imported torch and Paceline, and is forked into launchers, which spares seconds of each."""

import contextlib
import faulthandler
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

from paceline.cli import main, prepare, train_worker
from paceline.comm.stacks import SIGNAL
from paceline.launch import forking, local, worker  # noqa: F401 - imported for its forks
from paceline.testing.netlab_namespaces import enter_namespace

_MORE_PRELOADED = ["paceline.recipes.transformer_lm", "paceline.cli.train_worker", "numba"]


def warm_up() -> None:
    """Start the process that workers are forked from."""
    forking._PRELOADED.extend(name for name in _MORE_PRELOADED if name not in forking._PRELOADED)
    forking.prepare_to_fork()


class Launcher:
    """`paceline train` in a fork of this process, with what it prints in a file.

    Args:
        arguments: Arguments after ``paceline train``.
        folder: Folder of ``output.txt`` and ``launcher.pid``.
        environment: Additional variables.
        namespace: Path of the network namespace of the process; empty for this one's.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        namespace: str = "",
        name: str = "launcher",
    ) -> None:
        self._folder = folder
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            try:
                _be_launcher([*arguments], folder, environment or {}, namespace, name)
            finally:
                os._exit(1)
        self._file = os.pidfd_open(self.pid)
        self._code: int | None = None

    def wait(self, timeout_s: float) -> int:
        """Return its exit code; 124 if it runs on, whose stacks are then in its output, and it is killed."""
        if self._code is None:
            if not select.select([self._file], [], [], timeout_s)[0]:
                self._show_stacks()
                self.kill()
                self._code = 124
                return 124
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        """Kill it, and the workers that it has."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """Kill what is left of it."""
        self.kill()
        os.close(self._file)
        for pid in find_workers(self._folder / "run"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _show_stacks(self) -> None:
        """Write the stacks of the launcher and its workers to its output."""
        pids = [self.pid, *find_workers(self._folder / "run")]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)
        time.sleep(1.0)
        with (self._folder / "output.txt").open("ab") as output:
            for pid in pids:
                output.write(f"stacks of process {pid}:\n".encode() + _read_stacks(pid))


def _read_stacks(pid: int) -> bytes:
    """Return what a process wrote to the memory that `register_stacks` made for its stacks."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if path.readlink().name.startswith("memfd:paceline-stacks"):
                return path.read_bytes()
    return b"(none)\n"


def find_workers(run: Path) -> list[int]:
    """Return the numbers of living processes whose output goes to a run's folder of workers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "fd" / "1").readlink().is_relative_to(run):
                found.append(int(folder.name))
    return found


def wait_until_gone(run: Path, timeout_s: float = 60.0) -> bool:
    """Wait until no worker of a run is left; return whether that came in time."""
    deadline_s = time.monotonic() + timeout_s
    while find_workers(run):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def _be_launcher(arguments: list[str], folder: Path, environment: Mapping[str, str], namespace: str, name: str) -> None:
    os.setsid()
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    (folder / f"{name}.pid").write_text(str(os.getpid()))
    faulthandler.register(SIGNAL, all_threads=True)
    if namespace:
        enter_namespace(namespace)
    os.environ.update(environment)
    # It runs, but is not a child of this process.
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    program = sys.modules["__main__"]
    program.__file__ = program.__spec__ = None  # or workers would import it again
    prepare.write_report = train_worker.write_report = lambda directory: None  # it takes seconds
    sys.argv = ["paceline", "train", *arguments]
    code: object = 0
    try:
        main()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
