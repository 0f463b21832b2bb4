"""Ways to train on when a worker is lost: Paceline's, torchrun's restart, and torchft; each as processes of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import SettingsError
from paceline.monitor.events import RunStarted, StepFinished, WorkersChanged
from paceline.monitor.reader import read_log

_HERE = Path(__file__).parent
_MANY_RESTARTS = 10_000


@dataclass(frozen=True)
class Update:
    """An update that a worker has told of.

    Args:
        time_s: Unix time of its end.
        step: Number of updates done then.
        num_workers: Workers that took part.
    """

    time_s: float
    step: int
    num_workers: int


class TrainingSide(ABC):
    """A training under way, some of whose workers are killed.

    Args:
        num_workers: Number of workers.
        directory: Folder of its own, which exists and is empty.
        environment: Environment of its processes.
    """

    def __init__(self, num_workers: int, directory: Path, environment: Mapping[str, str]) -> None:
        self.num_workers, self.directory, self.environment = num_workers, directory, dict(environment)
        self._processes: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self) -> None:
        """Start training."""

    @abstractmethod
    def find_workers(self) -> dict[int, int]:
        """Return the process number of each worker that is alive, by its number."""

    @abstractmethod
    def read_updates(self) -> list[Update]:
        """Return all updates so far, in the order of time; one that was lost and done again is there twice."""

    def tend(self) -> None:
        """Do what somebody must do again and again, such as starting what was killed.

        Raises:
            RuntimeError: The launcher has ended, or whatever else must live.
        """
        if (code := self._processes[0].poll()) is not None:
            raise RuntimeError(f"a side must go on, but its launcher ended with code {code}; {self.last_words()}")

    def last_words(self) -> str:
        """Return the last lines that its processes have printed, as a sentence."""
        said = (self.directory / "output.txt").read_text(errors="replace").strip().splitlines()
        return "it said last: " + " / ".join(said[-3:])

    def stop(self) -> None:
        """End all of its processes."""
        for process in self._processes:  # launchers first, or they would start workers again
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        while workers := self.find_workers():
            for pid in workers.values():
                _kill(pid)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.directory / "output.txt").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        self._processes.append(process)
        return process


class PacelineSide(TrainingSide):
    """`paceline train`, whose workers go on without the one that is lost."""

    options: tuple[str, ...] = ()

    def start(self) -> None:
        """Start training."""
        workers = ("--workers", str(self.num_workers), *self.options)
        self._start([sys.executable, *_train_command(self.directory), *workers])

    def find_workers(self) -> dict[int, int]:
        """Return those whose output is a file of the run's, the numbers in the files' names."""
        found = {}
        for pid in _list_processes():
            with contextlib.suppress(OSError, ValueError, KeyError):
                output = Path(f"/proc/{pid}/fd/1").readlink()
                if output.parent == self.directory / "run" / "workers":
                    found[int("".join(filter(str.isdigit, output.stem)))] = pid
        return found

    def read_updates(self) -> list[Update]:
        """Return the updates in the run's log."""
        log, updates, num_workers = self.directory / "run" / "events.jsonl", [], 0
        for record in read_log(log) if log.exists() else ():
            if isinstance(record.event, RunStarted | WorkersChanged):
                num_workers = record.event.num_workers
            elif isinstance(record.event, StepFinished):
                updates.append(Update(record.unix_s, record.step, num_workers))
        return updates


class RestartSide(PacelineSide):
    """`paceline train`, whose workers all start again from the newest checkpoint when one is lost."""

    def __init__(self, num_workers: int, directory: Path, environment: Mapping[str, str]) -> None:
        super().__init__(num_workers, directory, environment)
        self.options = ("--min_workers", str(num_workers))


class TorchrunSide(PacelineSide):
    """torchrun, which starts all workers of `paceline train` again when one is lost."""

    def start(self) -> None:
        """Start training."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.num_workers)]
        command = [*launcher, "--max-restarts", str(_MANY_RESTARTS), *_train_command(self.directory)]
        self._start([sys.executable, *command])

    def find_workers(self) -> dict[int, int]:
        """Return the processes to which torchrun gave a rank of this training."""
        found = {}
        for pid in _list_processes():
            with contextlib.suppress(OSError, ValueError, KeyError):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                environment = dict(word.split(b"=", 1) for word in words if b"=" in word)
                if f"{self.directory}/run".encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found[int(environment[b"RANK"])] = pid
        return {rank: pid for rank, pid in found.items() if pid != self._processes[0].pid}


class TorchftSide(TrainingSide):
    """torchft: a lighthouse, and workers each of which is started again at once when it is gone.

    Args:
        num_workers: Number of workers.
        directory: Folder of its own.
        environment: Environment of its processes, where torchft can be imported.
    """

    def start(self) -> None:
        """Start the lighthouse and the workers."""
        address = self.directory / "lighthouse"
        self._start([sys.executable, "-c", _LIGHTHOUSE, str(address), str(self.num_workers)])
        while not address.exists():
            if (code := self._processes[0].poll()) is not None:
                raise SettingsError(
                    f"torchft must run here, but its lighthouse ended with {code}; read {self.directory}/output.txt, "
                    "or give the folder that `make torchft` has made"
                )
        self.environment["TORCHFT_LIGHTHOUSE"] = address.read_text()
        self._workers = [self._start_worker(number) for number in range(self.num_workers)]

    def find_workers(self) -> dict[int, int]:
        """Return the workers."""
        return {number: each.pid for number, each in enumerate(self._workers) if each.poll() is None}

    def read_updates(self) -> list[Update]:
        """Return the updates of all workers, of each the one that told of it first."""
        told: dict[int, Update] = {}
        for path in self.directory.glob("worker*.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    said = json.loads(line)
                    update = Update(said["time"], said["step"], said["workers"])
                    told[update.step] = min(told.get(update.step, update), update, key=lambda each: each.time_s)
        return sorted(told.values(), key=lambda update: update.time_s)

    def tend(self) -> None:
        """Start again what was killed."""
        super().tend()
        for number, worker in enumerate(self._workers):
            if worker.poll() is not None:
                self._workers[number] = self._start_worker(number)

    def _start_worker(self, number: int) -> subprocess.Popen[bytes]:
        log = self.directory / f"worker{number}.jsonl"
        command = [str(_HERE / "torchft_worker.py"), str(number), str(log), str(self.num_workers)]
        return self._start([sys.executable, *command])


_LIGHTHOUSE = """
import pathlib, sys, threading
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=50,
                          heartbeat_timeout_ms=1000)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(server.address())
path.with_suffix(".new").rename(path)
threading.Event().wait()
"""

SIDES: dict[str, type[TrainingSide]] = {
    "paceline": PacelineSide,
    "restart": RestartSide,
    "torchrun": TorchrunSide,
    "torchft": TorchftSide,
}
"""Sides by name."""


def _train_command(directory: Path) -> list[str]:
    return ["-m", "paceline", "train", f"{_HERE / 'task.py'}:run", "--out", str(directory / "run")]


def _list_processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def describe_environment(settings: Mapping[str, Any], import_path: Path | None) -> dict[str, str]:
    """Return the environment of processes that train the task.

    Args:
        settings: Environment variables of the task.
        import_path: Folder of more packages to import; None for none.
    """
    paths = [str(import_path)] if import_path is not None else []
    paths += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        **{name: str(value) for name, value in settings.items()},
    }
