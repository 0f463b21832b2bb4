"""The agent of another machine: it offers workers to a run that a launcher elsewhere trains, and starts them here."""

import contextlib
import dataclasses
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from paceline.checkpoint.durable import WriterLock
from paceline.comm.control import ControlAccess, ControlError, ControlStore
from paceline.comm.threads import start_thread
from paceline.data import Source
from paceline.errors import (
    CheckpointError,
    CommunicationError,
    DataError,
    PacelineError,
    SettingsError,
    StorageError,
    storing,
)
from paceline.launch.agent_messages import (
    INVITATION,
    MAIL,
    NUM_AGENTS,
    Demand,
    DocumentError,
    Invitation,
    Offer,
    chunk_key,
    demand_key,
    digest_code,
    find_versions,
    offer_key,
    read,
    read_versions,
    write,
)
from paceline.launch.exit_codes import ExitCode
from paceline.launch.signals import StopRequest
from paceline.launch.worker import WorkerOptions, load_run, work_for_agent
from paceline.launch.workforce import LocalWorkforce
from paceline.monitor.growth import GrowingFile
from paceline.training.run_file import RunFile

_POLL_S, _BEAT_S = 0.05, 0.25
_STOP_S = 15.0
"""Longest time that workers have to stop by themselves, with those elsewhere, once the launcher is gone."""
_CHUNK_BYTES = 256 * 1024


class LauncherLostError(CommunicationError):
    """The launcher no longer answers, or wants nothing of this machine any more though its workers run."""


def serve_launcher(
    access: ControlAccess,
    num_workers: int,
    *,
    name: str | None = None,
    out: Path | None = None,
    notice_s: float = 25.0,
    tell: Callable[[str], None] = print,
) -> ExitCode:
    """Offer workers to the run at `access` until it has ended, or SIGTERM or SIGINT asks this machine to leave.

    Args:
        access: Address and token of the run's control server.
        num_workers: Number of workers.
        name: Name of this machine in events; by default its host name.
        out: Folder for what the workers print and log here, one for each agent; by default ``runs/agent-NAME``.
        notice_s: Time after such a signal in which workers leave at a step boundary; then they are killed.
        tell: Function that is given words for people.

    Raises:
        SettingsError: The launcher refuses the workers, or this machine does not fit the run.
        LauncherLostError: The launcher no longer answers.
    """
    name = name or re.sub(r"[^\w.-]", "-", socket.gethostname())
    if not re.fullmatch(r"[\w.-]+", name):
        raise SettingsError(f"--name must be of letters, digits, dots and dashes, but got {name!r}; choose another")
    try:
        store = ControlStore(access)
        _check_versions(read_versions(store))
        invitation = read(store, INVITATION, Invitation)
    except ControlError as error:
        raise SettingsError(
            f"the agent must reach the launcher with the token of its run, but could not: {error}; check the address, "
            "the token file, and that paceline train --listen runs there"
        ) from error
    if invitation is None:
        raise SettingsError(
            f"the run at {access.address} must take workers of other machines, but does not; start it with --listen"
        )
    _check_device(num_workers)
    directory, lock = _prepare(invitation, (out or Path("runs") / f"agent-{name}").absolute())
    own_address = _find_own_address(access)
    options = WorkerOptions(0, invitation.launcher_timeout_s, invitation.leaves_on_sigterm)
    tell(f"run: {invitation.name} at {access.address}; what workers here print: {directory / 'workers'}")
    with StopRequest() as stop:
        workforce = LocalWorkforce(
            partial(work_for_agent, options=options),
            directory,
            num_workers,
            access,
            address=own_address,
            stop_signal=signal.SIGINT if invitation.leaves_on_sigterm else signal.SIGTERM,
        )
        service = _Service(
            store,
            workforce,
            Offer(name, num_workers),
            directory,
            stop,
            notice_s,
            tell,
            launcher_timeout_s=invitation.launcher_timeout_s,
        )
        try:
            return service.run()
        except ControlError as error:
            service.stop_workers()
            raise LauncherLostError(
                f"the launcher of {invitation.name} must answer, but no longer does, so the workers of this machine "
                f"were stopped: {error}; start the agent again once the run goes on"
            ) from error
        finally:
            workforce.kill_all()
            store.close()
            lock.release()


def _check_device(num_workers: int) -> None:
    """Raise `SettingsError` where workers would take GPUs: only CPUs can join yet."""
    if torch.cuda.is_available() and (num_gpus := torch.cuda.device_count()) >= num_workers:
        raise SettingsError(
            f"workers of an agent must compute on CPUs yet, but this machine has {num_gpus} GPUs for {num_workers}; "
            "hide them with CUDA_VISIBLE_DEVICES="
        )


def _check_versions(versions: Mapping[str, object]) -> None:
    """Raise `SettingsError` where a version is another one here: all else that is written may differ with it."""
    here = find_versions()
    for what, there in versions.items():
        if what in here and here[what] != there:
            raise SettingsError(
                f"{what} must be the same on all machines, but is {here[what]} here and {there} where the launcher "
                f"runs; install {what} {there} here"
            )


def _prepare(invitation: Invitation, parent: Path) -> tuple[Path, WriterLock]:
    """Return a folder in `parent` with the run's file, locked, once it is sure that this machine can take part.

    Raises:
        SettingsError: Versions, code or data are not the same here as where the launcher runs.
        StorageError: The folder cannot be written.
    """
    _check_versions(invitation.versions)
    file = RunFile.model_validate(invitation.file)
    try:
        run = load_run(file)
    except PacelineError as error:
        raise SettingsError(
            f"the code of {file.recipe} must lie under the same path on this machine, but: {error}; copy it here"
        ) from error
    if digest_code(file.recipe) != invitation.code:
        raise SettingsError(
            f"{file.recipe} must be the same file on all machines, but another one lies here; copy the launcher's here"
        )
    try:
        train = run.open_data().train
    except DataError as error:
        raise SettingsError(
            f"the data of the run must lie under the same path on this machine, but: {error}; copy it here, or start "
            "the agent in the folder that the launcher was started in"
        ) from error
    num_samples = len(train) if isinstance(train, Source) else -1
    if num_samples != invitation.num_samples:
        raise SettingsError(
            f"the data of the run must be the same on all machines, but has {num_samples} samples here and "
            f"{invitation.num_samples} where the launcher runs; copy the launcher's here"
        )
    directory, lock = _take_folder(parent, invitation.name)
    with storing(directory):
        if not (directory / "run.json").exists() or RunFile.load(directory) != file:
            file.save(directory)
        (directory / "events.jsonl").touch()
    return directory, lock


def _take_folder(parent: Path, name: str) -> tuple[Path, WriterLock]:
    """Return a folder for a run and its lock: ``NAME``, or ``NAME-2`` if another agent holds that, and so on."""
    number = 1
    while True:
        directory = parent / (f"{name}-{number}" if number > 1 else name)
        with storing(directory / "workers"):
            (directory / "workers").mkdir(parents=True, exist_ok=True)
        lock = WriterLock(directory)
        try:
            lock.acquire()
        except StorageError:
            raise
        except CheckpointError:  # another agent has it
            number += 1
        else:
            return directory, lock


class _Service:
    """The loop of an agent."""

    def __init__(
        self,
        store: ControlStore,
        workforce: LocalWorkforce,
        offer: Offer,
        directory: Path,
        stop: StopRequest,
        notice_s: float,
        tell: Callable[[str], None],
        *,
        launcher_timeout_s: float = 0.0,
    ) -> None:
        self._store, self._workforce, self._offer = store, workforce, offer
        self._stop, self._notice_s, self._tell = stop, notice_s, tell
        self._launcher_timeout_s = launcher_timeout_s
        self._log = GrowingFile(directory / "events.jsonl")  # what is there is of an earlier time
        workforce.tell_asked = lambda number: self._change(asked=number)  # told with the end of that one
        self._started: set[str] = set()
        self._killed: set[str] = set()
        self._num_signals = 0
        self._said_s = 0.0
        self._number = 0
        self._leave_by_s: float | None = None

    def run(self) -> ExitCode:
        """Do what the launcher asks for until it asks for nothing more; without one, wait a while for another."""
        self._number = self._store.add(NUM_AGENTS, 1)
        self._say()
        answered_s = time.monotonic()
        while True:
            try:
                code = self._get_on()
            except ControlError:
                if time.monotonic() - answered_s > self._launcher_timeout_s or self._is_late:
                    raise
                continue
            if code is not None:
                return code
            answered_s = time.monotonic()

    def _get_on(self) -> ExitCode | None:
        """Do what the launcher asks for now, and return an exit code if that is all."""
        ended, stop = self._workforce.wait(_POLL_S), self._stop
        for words in self._workforce.read_news():
            self._tell(words)
        for name, _, _ in ended:
            self._workforce.forget(name)
        if ended:
            self._change(ended=self._offer.ended | {name: (end, reason) for name, end, reason in ended})
        if stop.number and self._leave_by_s is None:
            self._leave_by_s = time.monotonic() + self._notice_s
            name = signal.Signals(stop.number).name
            self._tell(f"{name}: the workers of this machine leave within {self._notice_s:g} s")
            self._say(is_leaving=True)
        try:
            demand = read(self._store, demand_key(self._number), Demand) or Demand()
        except DocumentError as error:
            return self._end(Demand(over=str(error), is_refused=True))
        self._forward_log()
        if ended:
            self._say(ended=self._offer.ended)
        if demand.over:
            return self._end(demand)
        self._obey(demand)
        if self._is_late and self._started <= set(self._offer.ended):  # the launcher has not said that they may go
            return self._end(Demand(over="the time to leave is over"))
        if self._is_late:
            self._workforce.kill_all_running()
        if time.monotonic() - self._said_s > _BEAT_S:
            self._say()
        return None

    @property
    def _is_late(self) -> bool:
        return self._leave_by_s is not None and time.monotonic() > self._leave_by_s

    def stop_workers(self) -> None:
        """Let workers stop with those elsewhere, which save a checkpoint, if they can; else kill them."""
        self._workforce.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + _STOP_S
        while self._workforce.is_running and time.monotonic() < deadline_s:
            self._workforce.wait(_POLL_S)
        self._workforce.kill_all()

    def _obey(self, demand: Demand) -> None:
        for name, (slot, epoch) in demand.start.items():
            if name not in self._started and self._leave_by_s is None:
                self._started.add(name)
                with self._beating():
                    self._workforce.start(name, slot, epoch)
        for name in demand.kill:
            if name not in self._killed:
                self._killed.add(name)
                self._workforce.kill(name)
        for number in demand.signals[self._num_signals :]:
            self._workforce.signal(number)
        self._num_signals = len(demand.signals)

    @contextlib.contextmanager
    def _beating(self) -> Iterator[None]:
        """Give signs of life from a thread: a start may take long, as the first one waits for an import of torch."""
        is_over = threading.Event()

        def beat() -> None:
            with contextlib.suppress(ControlError):  # the loop finds it too
                while not is_over.wait(_BEAT_S):
                    self._say()

        thread = start_thread(beat, name="paceline-agent", stop=is_over.set)
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _end(self, demand: Demand) -> ExitCode:
        were_running = self._workforce.is_running
        self._workforce.kill_all()
        self._forward_log()
        self._say(is_closed=True)
        if demand.is_refused:
            raise SettingsError(demand.over)
        if were_running and self._leave_by_s is None:
            raise LauncherLostError(
                f"the launcher must want the workers of this machine, but no longer does, so they were stopped: "
                f"{demand.over}; start the agent again to offer new ones"
            )
        self._tell(demand.over)
        return ExitCode.FINISHED

    def _forward_log(self) -> None:
        """Send the lines that workers have written since the last time."""
        for lines in self._log.read(_CHUNK_BYTES):
            self._store.set(chunk_key(self._number, self._offer.num_chunks), lines)
            self._say(num_chunks=self._offer.num_chunks + 1)

    def _say(self, **changes: object) -> None:
        self._said_s = time.monotonic()
        self._change(beat=self._offer.beat + 1, **changes)
        write(self._store, offer_key(self._number), self._offer)
        if changes or self._offer.beat == 1:
            self._store.add(MAIL, 1)

    def _change(self, **changes: object) -> None:
        self._offer = dataclasses.replace(self._offer, **changes)  # type: ignore[arg-type]


def _find_own_address(access: ControlAccess) -> str:
    """Return the address by which this machine reaches the launcher: that of the interface for its connections."""
    family = socket.AF_INET6 if ":" in access.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect((access.host, access.port))
        return str(probe.getsockname()[0])
