"""Workers on this machine, replaced or started again when one is killed."""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from paceline.comm.control import ControlAccess, ControlServer, ControlStore, KeyValues, RequestLog
from paceline.elastic.facts import Fact, HostLost
from paceline.elastic.journal import JOURNAL, Journal
from paceline.elastic.protocol import Coordinator, MembershipSettings
from paceline.elastic.requests import RequestBox
from paceline.elastic.supervisor import EndVerdict, Supervisor
from paceline.elastic.watch import Patience
from paceline.errors import SettingsError, StorageError, storing
from paceline.launch.agents import SpreadWorkforce
from paceline.launch.changes import Changes
from paceline.launch.exit_codes import ExitCode
from paceline.launch.launcher_watch import RECORD
from paceline.launch.left_run import REQUESTS_FILE, LeftRun
from paceline.launch.place import LAUNCHER_FILE, LauncherPlace, ReplacedError, end_replaced
from paceline.launch.processes import ACCESS_FILE
from paceline.launch.scaling import PolicyCaller
from paceline.launch.signals import StopRequest, drop_lost_output
from paceline.launch.verdict import Outcome, describe_killed, judge
from paceline.launch.worker import WorkerOptions, work_for_launcher
from paceline.launch.workforce import LocalWorkforce
from paceline.monitor.events import Event, Failed, Restarted, Warned
from paceline.monitor.live import LiveView
from paceline.monitor.log import EventLog
from paceline.monitor.reader import Records, read_log, select
from paceline.training.run_file import RunFile

_Reader: TypeAlias = Callable[[Coordinator], list[Fact]]


def launch(
    directory: Path,
    num_processes: int,
    *,
    max_restarts: int = 3,
    min_workers: int | None = None,
    num_spares: int = 0,
    changes: Changes | None = None,
    view: LiveView | None = None,
    left: LeftRun | None = None,
    tell_end: Callable[[ExitCode], None] = lambda _: None,
) -> ExitCode:
    """Train the run of `directory` with `num_processes` processes here, and show how it goes.

    When a worker is lost, the others go on without it from memory, and a new one takes its place at a step boundary.
    Where they cannot, all start again from the newest valid checkpoint. Both happen as often as the run gets further,
    and `max_restarts` times without progress. An error that would only happen again ends the run at once. SIGTERM,
    SIGINT and SIGHUP are handed on to the workers, which save and leave.

    Args:
        directory: Directory of the run.
        num_processes: Number of workers.
        max_restarts: Number of failures in a row, without progress, that are borne.
        min_workers: Number of workers that must be left to go on from memory; None for half of them.
        num_spares: Number of workers that are started in addition, and wait for one to be lost.
        changes: Ways in which workers change besides.
        view: View of the run.
        left: Workers that a launcher has left, and that train on: they are taken over, with the numbers above as they
            were begun.
        tell_end: Function that is told the exit code before signals are no longer handed on to workers.

    Raises:
        SettingsError: There is no such address to listen at, or no such policy.
        StorageError: The directory cannot be written.
    """
    changes = changes or Changes()
    check_min_workers(min_workers, num_processes)
    log_path = directory / "events.jsonl"
    place = _take_place(directory, left)
    with (view or LiveView()).following(log_path), StopRequest() as stop:
        settings = MembershipSettings(
            num_processes,
            min_workers=min_workers,
            num_spares=num_spares,
            max_restarts=max_restarts,
            first_epoch=max((record.epoch for record in _read(log_path)), default=-1) + 1,
        )
        if left is not None:
            settings = _take_settings(settings, left, directory)
        with _open_server(directory, left, changes, settings.first_epoch) as server:
            server.access.save(directory / "workers" / ACCESS_FILE)
            if num_spares and min_workers == num_processes:
                warned = Warned(
                    message=f"--spares {num_spares} cannot avoid the restart from the checkpoint at each loss that "
                    f"--min_workers {min_workers}, as many as --workers, asks for; give fewer --min_workers"
                )
                _tell(directory, log_path, settings.first_epoch, warned)
            if changes.listen is not None:
                token_file = directory / "workers" / ACCESS_FILE
                print(f"agents: paceline agent {server.access.address} --token_file {token_file}", flush=True)
            try:
                code = _supervise(directory, settings, stop, server.access, changes, place, left)
                tell_end(code)
            finally:
                (directory / "workers" / ACCESS_FILE).unlink(missing_ok=True)
                place.release()
    drop_lost_output()
    return code


def _take_place(directory: Path, left: LeftRun | None) -> LauncherPlace:
    """Return the place of the launcher, and clear what one that was killed has left, unless its workers live."""
    folder = directory / "workers"
    with storing(folder):
        folder.mkdir(exist_ok=True)
        of_processes = ("w*.pid", f"*{RECORD}", f".*{RECORD}.*", f".{LAUNCHER_FILE}.*")
        for pattern in (ACCESS_FILE, f".{ACCESS_FILE}.*", REQUESTS_FILE, f".{REQUESTS_FILE}.*", *of_processes):
            for file in folder.glob(pattern) if left is None else ():
                file.unlink(missing_ok=True)
    return LauncherPlace(folder)


def _take_settings(given: MembershipSettings, left: LeftRun, directory: Path) -> MembershipSettings:
    """Return the settings of a run that is taken over, and tell people so."""
    begun = left.coordinator.settings
    workers = ", ".join(left.coordinator.workers)
    words = f"process {os.getpid()} takes the place of a launcher that was lost; workers: {workers}"
    for name, option in (("min_workers", "min_workers"), ("num_spares", "spares"), ("max_restarts", "max-restarts")):
        if (before := getattr(begun, name)) != (now := getattr(given, name)):
            kept = f"no --{option}" if before is None else f"--{option} {before}"
            words += f"; kept as begun: {kept}, though {'none' if now is None else now} was given"
    _tell(directory, directory / "events.jsonl", max(left.coordinator.epoch, begun.first_epoch), Warned(message=words))
    return begun


@contextmanager
def _open_server(directory: Path, left: LeftRun | None, changes: Changes, epoch: int) -> Iterator[ControlServer]:
    """Open the control server of a run, if it can at the address that workers know, and log its requests."""

    def tell_lost(words: str) -> None:
        with suppress(StorageError):
            _tell(directory, directory / "events.jsonl", epoch, Warned(message=words))

    key_values = left.key_values if left is not None else KeyValues()
    with closing(RequestLog(directory / "workers" / REQUESTS_FILE, key_values, tell_lost=tell_lost)):
        if left is None:
            server = ControlServer(*(changes.listen or ()), key_values=key_values)
        else:
            token, (host, port) = left.access.token, changes.listen or (left.access.host, 0)
            port = port or (left.access.port if host == left.access.host else 0)
            try:
                server = ControlServer(host, port, token=token, key_values=key_values)
            except SettingsError:
                if changes.listen is not None:  # agents know no other one
                    raise
                server = ControlServer(host, token=token, key_values=key_values)
        with server:
            yield server


def check_min_workers(min_workers: int | None, num_workers: int) -> None:
    """Raise `SettingsError` where a run could never go on from memory, not even with all of its workers."""
    if min_workers is not None and min_workers > num_workers:
        raise SettingsError(
            f"--min_workers must be at most the {num_workers} workers, but got {min_workers}; as many as --workers "
            "lets every loss start all again from the checkpoint"
        )


def _supervise(
    directory: Path,
    settings: MembershipSettings,
    stop: StopRequest,
    access: ControlAccess,
    changes: Changes,
    place: LauncherPlace,
    left: LeftRun | None,
) -> ExitCode:
    log_path, store = directory / "events.jsonl", ControlStore(access)
    local = _open_workforce(directory, settings.target, access, changes, place.number)
    coordinator = Coordinator(settings) if left is None else left.coordinator
    outcomes: list[Outcome] = []

    def find_verdict(epoch: int) -> EndVerdict:
        records = [record for record in _read(log_path) if record.epoch >= epoch]
        killed = list(supervisor.killed.values())
        outcomes.append(outcome := judge(records, local.ended, stop.number != 0, directory / "workers", killed))
        local.begin_again()
        if outcome.mismatch:
            failed = Failed(error="MismatchError", message=outcome.mismatch, traceback="")
            _tell(directory, log_path, epoch, failed)
        is_final = outcome.code is not ExitCode.PEERS_LOST or bool(outcome.mismatch)
        return EndVerdict(is_final, outcome.last_step, outcome.reason)

    def tell_standstill(words: str) -> None:
        _tell(directory, log_path, supervisor.coordinator.epoch, Warned(message=words))

    journal = Journal(directory / JOURNAL, settings if left is None else None)
    with closing(store), journal, ExitStack() as stack:
        workforce, readers = _open_ways(directory, settings, store, local, changes, stop, stack, left)
        if changes.listen is None:
            _lose_hosts(coordinator, journal)
        supervisor = Supervisor(
            coordinator,
            store,
            workforce,
            journal,
            judge=find_verdict,
            tell_restart=partial(_tell_restart, directory, log_path),
            tell_standstill=tell_standstill,
            read_requests=lambda coordinator: [fact for read in readers for fact in read(coordinator)],
            ask_to_stop=lambda: workforce.signal(signal.SIGTERM),
            check_place=place.check,
            notice_s=changes.notice_s,
            patience=Patience(standstill_s=RunFile.load(directory).run.get("hang_timeout_s") or Patience.standstill_s),
        )

        def stop_all(number: int) -> None:
            supervisor.is_stopping = True
            workforce.signal(number)

        stop.hand_on, local.tell_asked = stop_all, stop.note
        if stop.number:
            stop_all(stop.number)
        try:
            supervisor.run(takes_over=left is not None)
        except ReplacedError as error:
            end_replaced(error)
        except Exception:  # a bug here, or a disk that is full, costs no more than the death of this process
            try:
                workforce.end_all()  # what was trained is saved first
            finally:
                local.end_all()
            raise
        finally:
            stop.hand_on = lambda _: None
            local.kill_all()
    epoch = supervisor.coordinator.epoch
    if supervisor.killed_at_stop:
        words = describe_killed(supervisor.killed_at_stop, _read(log_path), settings.first_epoch)
        _tell(directory, log_path, epoch, Warned(message=words))
    if supervisor.gave_up:
        failed = Failed(error="CommunicationError", message=supervisor.gave_up, traceback="")
        _tell(directory, log_path, epoch, failed)
        return ExitCode.FAILED
    if outcomes and supervisor.has_verdict:
        return ExitCode.FAILED if outcomes[-1].mismatch else outcomes[-1].code
    records = [record for record in _read(log_path) if record.epoch >= epoch]
    return judge(records, local.ended, stop.number != 0, directory / "workers").code


def _lose_hosts(coordinator: Coordinator, journal: Journal) -> None:
    """Count other machines of a run that was taken over as lost; what follows is outstanding then."""
    for host in [*coordinator.places]:
        journal.append(lost := HostLost(host, "the launcher listens to other machines no longer"))
        coordinator.handle(lost)


def _open_workforce(
    directory: Path, size: int, access: ControlAccess, changes: Changes, launcher: int
) -> LocalWorkforce:
    leaves_on_sigterm = changes.notice_s is not None
    options = WorkerOptions(launcher, changes.launcher_timeout_s, leaves_on_sigterm)
    return LocalWorkforce(
        partial(work_for_launcher, options=options),
        directory,
        size,
        access,
        address=access.host if changes.listen is not None else "",
        stop_signal=signal.SIGINT if leaves_on_sigterm else signal.SIGTERM,
    )


def _open_ways(
    directory: Path,
    settings: MembershipSettings,
    store: ControlStore,
    local: LocalWorkforce,
    changes: Changes,
    stop: StopRequest,
    stack: ExitStack,
    left: LeftRun | None,
) -> tuple[LocalWorkforce | SpreadWorkforce, list[_Reader]]:
    """Return all workers' processes, here and elsewhere, and functions that read which changes are asked for.

    Processes of a run that is taken over are among them.
    """
    log_path, most = directory / "events.jsonl", _find_most_workers(directory, settings.target)
    box = RequestBox(directory, *most, notice_s=changes.notice_s, keeps_older=left is not None)
    readers: list[_Reader] = [box.read]
    workforce: LocalWorkforce | SpreadWorkforce = local

    def warn(message: str) -> None:
        _tell(directory, log_path, settings.first_epoch, Warned(message=message))

    if changes.listen is not None:
        log = stack.enter_context(EventLog(log_path, run=directory.name, rank=-1, epoch=settings.first_epoch))
        workforce = spread = SpreadWorkforce(local, store, log, *most)
        spread.invite(directory, changes.launcher_timeout_s, leaves_on_sigterm=changes.notice_s is not None)
        stack.callback(lambda: spread.close(f"the launcher has ended: {_describe_end(stop)}"))
        readers.append(spread.read_facts)
    if changes.scaling is not None:
        readers.append(PolicyCaller(changes.scaling, log_path, most[0], warn).read_facts)
    if left is not None:
        workforce.take_over(left.coordinator)
    return workforce, readers


def _read(log_path: Path) -> Records:
    """Return the records of the log; none where somebody has removed it, and nobody has written since."""
    return read_log(log_path) if log_path.is_file() else Records()


def _describe_end(stop: StopRequest) -> str:
    return f"{signal.Signals(stop.number).name} stopped the run" if stop.number else "the run is over"


def _find_most_workers(directory: Path, num_processes: int) -> tuple[int, str]:
    """Return the largest number of workers that the run can have here, and the reason for it."""
    num_gpus = torch.cuda.device_count()
    if num_gpus >= num_processes:
        return num_gpus, "the number of GPUs of this host"
    run = RunFile.load(directory).run
    if num_virtual := run.get("num_virtual_workers"):
        return num_virtual, "the virtual workers of the run"
    return run["global_batch"], "the samples of a global batch"


def _tell_restart(directory: Path, log_path: Path, epoch: int, reason: str) -> None:
    number = len(select(_read(log_path), Restarted)) + 1  # epochs count other changes too
    _tell(directory, log_path, epoch, Restarted(attempt=number, reason=reason))


def _tell(directory: Path, log_path: Path, attempt: int, event: Event) -> None:
    """Log an event of the launcher's.

    Raises:
        StorageError: The log cannot be written, so that a new start would end the same way.
    """
    with (
        storing(log_path),
        warnings.catch_warnings(action="ignore"),
        EventLog(log_path, run=directory.name, rank=-1, epoch=attempt, clock=time.monotonic) as log,
    ):
        log.write(event, step=-1)
        if log.last_error is not None:
            raise log.last_error
