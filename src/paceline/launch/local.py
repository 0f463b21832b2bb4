"""Workers on this machine, replaced or started again when one is killed."""

import re
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

import paceline.errors
from paceline.comm.control import ControlAccess, ControlServer, ControlStore
from paceline.elastic.facts import Fact
from paceline.elastic.journal import JOURNAL, Journal
from paceline.elastic.protocol import Coordinator, MembershipSettings
from paceline.elastic.requests import RequestBox
from paceline.elastic.supervisor import EndVerdict, Supervisor
from paceline.elastic.watch import Patience
from paceline.errors import SettingsError, storing
from paceline.launch.agents import SpreadWorkforce
from paceline.launch.changes import Changes
from paceline.launch.exit_codes import ExitCode, find_exit_code
from paceline.launch.processes import ACCESS_FILE, Ended
from paceline.launch.scaling import PolicyCaller
from paceline.launch.signals import StopRequest, drop_lost_output
from paceline.launch.worker import work_for_launcher
from paceline.launch.workforce import LocalWorkforce
from paceline.monitor.events import Event, Failed, Preempted, Record, Restarted, RunFinished, StepFinished, Warned
from paceline.monitor.live import LiveView
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log, select
from paceline.training.run import RunFile

_LOST_PEERS = ("CommunicationError", "PeerTimeoutError")
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
"""Words of gloo before it aborts a process."""
_Reader: TypeAlias = Callable[[Coordinator], list[Fact]]
_OPERATION = re.compile(r'distributed_c10d\.py", line \d+ in (\w+)')
"""Operation of torch on the stack of a process that is aborted."""


@dataclass(frozen=True)
class _Outcome:
    """How one start of all workers ended."""

    code: ExitCode
    reason: str = ""
    last_step: int = -1
    mismatch: str = ""
    """Sentence on the operations of ranks, if torch ended one because another ran something else; empty if not."""


def launch(
    directory: Path,
    num_processes: int,
    *,
    max_restarts: int = 3,
    min_workers: int | None = None,
    num_spares: int = 0,
    changes: Changes | None = None,
    view: LiveView | None = None,
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

    Raises:
        SettingsError: There is no such address to listen at, or no such policy.
        StorageError: The directory cannot be written.
    """
    changes = changes or Changes()
    check_min_workers(min_workers, num_processes)
    log_path = directory / "events.jsonl"
    with storing(directory / "workers"):
        (directory / "workers").mkdir(exist_ok=True)
        for pattern in (ACCESS_FILE, f".{ACCESS_FILE}.*", "w*.pid"):  # of a launcher that was killed
            for left in (directory / "workers").glob(pattern):
                left.unlink(missing_ok=True)
    with (view or LiveView()).following(log_path), StopRequest() as stop:
        settings = MembershipSettings(
            num_processes,
            min_workers=min_workers,
            num_spares=num_spares,
            max_restarts=max_restarts,
            first_epoch=max((record.epoch for record in read_log(log_path)), default=-1) + 1,
        )
        with ControlServer(*(changes.listen or ())) as server:
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
                code = _supervise(directory, settings, stop, server.access, changes)
            finally:
                (directory / "workers" / ACCESS_FILE).unlink(missing_ok=True)
    drop_lost_output()
    return code


def check_min_workers(min_workers: int | None, num_workers: int) -> None:
    """Raise `SettingsError` where a run could never go on from memory, not even with all of its workers."""
    if min_workers is not None and min_workers > num_workers:
        raise SettingsError(
            f"--min_workers must be at most the {num_workers} workers, but got {min_workers}; as many as --workers "
            "lets every loss start all again from the checkpoint"
        )


def _supervise(
    directory: Path, settings: MembershipSettings, stop: StopRequest, access: ControlAccess, changes: Changes
) -> ExitCode:
    log_path, store = directory / "events.jsonl", ControlStore(access)
    local = _open_workforce(directory, settings.target, access, changes)
    outcomes: list[_Outcome] = []

    def judge(epoch: int) -> EndVerdict:
        records = [record for record in read_log(log_path) if record.epoch >= epoch]
        killed = list(supervisor.killed.values())
        outcomes.append(outcome := _judge(records, local.ended, stop.number != 0, directory / "workers", killed))
        local.begin_again()
        if outcome.mismatch:
            failed = Failed(error="MismatchError", message=outcome.mismatch, traceback="")
            _tell(directory, log_path, epoch, failed)
        is_final = outcome.code is not ExitCode.PEERS_LOST or bool(outcome.mismatch)
        return EndVerdict(is_final, outcome.last_step, outcome.reason)

    def tell_standstill(words: str) -> None:
        _tell(directory, log_path, supervisor.coordinator.epoch, Warned(message=words))

    with closing(store), Journal(directory / JOURNAL, settings) as journal, ExitStack() as stack:
        workforce, readers = _open_ways(directory, settings, store, local, changes, stop, stack)
        supervisor = Supervisor(
            Coordinator(settings),
            store,
            workforce,
            journal,
            judge=judge,
            tell_restart=partial(_tell_restart, directory, log_path),
            tell_standstill=tell_standstill,
            read_requests=lambda coordinator: [fact for read in readers for fact in read(coordinator)],
            ask_to_stop=lambda: workforce.signal(signal.SIGTERM),
            notice_s=changes.notice_s,
            patience=Patience(standstill_s=RunFile.load(directory).run.get("hang_timeout_s") or Patience.standstill_s),
        )

        def stop_all(number: int) -> None:
            supervisor.is_stopping = True
            workforce.signal(number)

        stop.hand_on = stop_all
        if stop.number:
            stop_all(stop.number)
        try:
            supervisor.run()
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
        words = _describe_killed(supervisor.killed_at_stop, read_log(log_path), settings.first_epoch)
        _tell(directory, log_path, epoch, Warned(message=words))
    if supervisor.gave_up:
        failed = Failed(error="CommunicationError", message=supervisor.gave_up, traceback="")
        _tell(directory, log_path, epoch, failed)
        return ExitCode.FAILED
    if outcomes and supervisor.has_verdict:
        return ExitCode.FAILED if outcomes[-1].mismatch else outcomes[-1].code
    records = [record for record in read_log(log_path) if record.epoch >= epoch]
    return _judge(records, local.ended, stop.number != 0, directory / "workers").code


def _describe_killed(killed: dict[str, str], records: list[Record], first_epoch: int) -> str:
    """Return who was killed after all were asked to stop, and whether the others saved a checkpoint, in words."""
    saved = select([record for record in records if record.epoch >= first_epoch], Preempted)
    end = f"the others saved {saved[-1].event.checkpoint}" if saved else "no checkpoint was written for the stop"
    return f"{', '.join(killed)} did not stop as asked, and had to be killed; {end}; {'; '.join(killed.values())}"


def _open_workforce(directory: Path, size: int, access: ControlAccess, changes: Changes) -> LocalWorkforce:
    leaves_on_sigterm = changes.notice_s is not None
    return LocalWorkforce(
        partial(work_for_launcher, leaves_on_sigterm=leaves_on_sigterm),
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
) -> tuple[LocalWorkforce | SpreadWorkforce, list[_Reader]]:
    """Return all workers' processes, here and elsewhere, and functions that read which changes are asked for."""
    log_path, most = directory / "events.jsonl", _find_most_workers(directory, settings.target)
    readers: list[_Reader] = [RequestBox(directory, *most, notice_s=changes.notice_s).read]
    workforce: LocalWorkforce | SpreadWorkforce = local

    def warn(message: str) -> None:
        _tell(directory, log_path, settings.first_epoch, Warned(message=message))

    if changes.listen is not None:
        log = stack.enter_context(EventLog(log_path, run=directory.name, rank=-1, epoch=settings.first_epoch))
        workforce = spread = SpreadWorkforce(local, store, log, *most)
        spread.invite(directory, leaves_on_sigterm=changes.notice_s is not None)
        stack.callback(lambda: spread.close(f"the launcher has ended: {_describe_end(stop)}"))
        readers.append(spread.read_facts)
    if changes.scaling is not None:
        readers.append(PolicyCaller(changes.scaling, log_path, most[0], warn).read_facts)
    return workforce, readers


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


def _judge(records: list[Record], ended: Ended, signalled: bool, output: Path, killed: Sequence[str] = ()) -> _Outcome:
    last_step = max((record.step for record in select(records, StepFinished)), default=-1)
    failures = select(records, Failed)
    if select(records, Preempted):
        return _Outcome(ExitCode.PREEMPTED)
    final = [failure.event for failure in failures if failure.event.error not in _LOST_PEERS]
    if final:
        return _Outcome(find_exit_code(getattr(paceline.errors, final[0].error, Exception)))
    if select(records, RunFinished):
        return _Outcome(ExitCode.FINISHED)
    if signalled:  # before the first step there was nothing to save
        return _Outcome(ExitCode.FAILED if last_step >= 0 else ExitCode.PREEMPTED)
    reason = "; ".join(dict.fromkeys(killed)) or _find_cause(failures, ended)
    return _Outcome(ExitCode.PEERS_LOST, reason, last_step, _find_mismatch(failures, ended, output))


def _find_cause(failures: list[Record[Failed]], ended: Ended) -> str:
    """Return who ended without an error message or, if nobody did, what the first rank to notice says of the others."""
    told = (ExitCode.PEERS_LOST, ExitCode.PREEMPTED)
    odd = {rank: code for rank, code in ended.failures.items() if code not in told}
    if odd:
        return "; ".join(_describe_exit(rank, code) for rank, code in odd.items())
    # Who ran out of time has looked where everybody is; to others, it is then the one that is gone.
    reports = sorted(failures, key=lambda failure: failure.event.error != paceline.errors.PeerTimeoutError.__name__)
    if not reports:
        return "the workers ended without an error message"
    return f"rank {reports[0].rank}: {reports[0].event.message}"


def _find_mismatch(failures: list[Record[Failed]], ended: Ended, output: Path) -> str:
    """Return what ranks ran, if gloo aborted one that got a message of another size; empty if it did not."""
    for rank in (rank for rank, code in ended.failures.items() if code == -signal.SIGABRT):
        said = (output / f"rank{rank}.err").read_text(errors="replace").rpartition("---- started again")[2]
        if sizes := _SIZES.search(said):
            operation = _OPERATION.search(said)
            others = "".join(f"; rank {each.rank}: {each.event.message}" for each in failures)
            return (
                f"ranks must run the same operations, but rank {rank}, in {operation[1] if operation else 'one'}, got "
                f"{sizes[1]} bytes where it expected {sizes[2]}{others}; let every rank run the same modules; the "
                f"stack is in {output / f'rank{rank}.err'}"
            )
    return ""


def _describe_exit(rank: int, code: int) -> str:
    if code < 0:
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    return f"rank {rank} exited with code {code}"


def _tell_restart(directory: Path, log_path: Path, epoch: int, reason: str) -> None:
    number = len(select(read_log(log_path), Restarted)) + 1  # epochs count other changes too
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
