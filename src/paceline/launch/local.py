"""Workers on this machine, started through torch's elastic launcher and started again when one is killed."""

import logging
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import paceline.errors
from paceline.launch.exit_codes import ExitCode
from paceline.launch.forking import START_METHOD, prepare_to_fork
from paceline.launch.worker import work_for_launcher
from paceline.monitor.events import Event, Failed, Preempted, Record, Restarted, RunFinished, StepFinished
from paceline.monitor.live import LiveView
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log

_LOST_PEERS = ("CommunicationError", "PeerTimeoutError")


@dataclass(frozen=True)
class _Outcome:
    """How one start of all workers ended."""

    code: ExitCode
    reason: str = ""
    last_step: int = -1


def launch(directory: Path, num_processes: int, *, max_restarts: int = 3, view: LiveView | None = None) -> ExitCode:
    """Train the run of `directory` with `num_processes` processes here, and show how it goes.

    When a worker is killed, or loses the others, all start again from the newest valid checkpoint: as often as that
    gets the run further, and `max_restarts` times without progress. An error that would only happen again ends the
    run at once.
    """
    log_path = directory / "events.jsonl"
    with (view or LiveView()).following(log_path):
        return _launch_until_done(directory, log_path, num_processes, max_restarts)


def start_processes(
    num_processes: int, function: Callable[..., Any], *arguments: Any, logs: DefaultLogsSpecs
) -> dict[int, Any]:
    """Run a function in processes here that find each other as torchrun's do; each has one try.

    On Linux they are forked from a process that has imported torch and Paceline for them, and for those started later.

    Returns:
        What the function returned, by rank.

    Raises:
        ChildFailedError: One of them failed.
        SignalException: This process got a signal, and has handed it on to them.
    """
    prepare_to_fork()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,  # restarts are ours: each gets a store of its own, and only where it can help
        start_method=START_METHOD,
        logs_specs=logs,
        shutdown_timeout=40,
    )
    results: dict[int, Any] = elastic_launch(config, function)(*arguments)
    return results


def _launch_until_done(directory: Path, log_path: Path, num_processes: int, max_restarts: int) -> ExitCode:
    furthest, num_restarts = -1, 0
    attempt = max((record.epoch for record in read_log(log_path)), default=-1) + 1
    while True:
        outcome = _launch_once(directory, log_path, num_processes, attempt)
        if outcome.code is not ExitCode.PEERS_LOST:
            return outcome.code
        num_restarts = num_restarts + 1 if outcome.last_step <= furthest else 1
        furthest = max(furthest, outcome.last_step)
        if num_restarts > max_restarts:
            message = f"gave up after {max_restarts} restarts without progress: {outcome.reason}"
            _tell(
                directory,
                log_path,
                attempt,
                Failed(error="CommunicationError", message=message, traceback=""),
            )
            return ExitCode.FAILED
        attempt += 1
        _tell(directory, log_path, attempt, Restarted(attempt=attempt, reason=outcome.reason))


def _launch_once(directory: Path, log_path: Path, num_processes: int, attempt: int) -> _Outcome:
    _silence_launcher()
    logs = DefaultLogsSpecs(str(directory / "workers"), redirects=Std.ALL)
    reason, signalled = "", False
    try:
        start_processes(num_processes, work_for_launcher, directory, attempt, logs=logs)
    except SignalException:
        signalled = True
    except ChildFailedError as error:
        reason = "; ".join(_describe_exit(rank, failure.exitcode) for rank, failure in error.failures.items())
    records = [record for record in read_log(log_path) if record.epoch == attempt]
    return _judge(records, reason, signalled)


def _judge(records: list[Record], reason: str, signalled: bool) -> _Outcome:
    last_step = max((record.step for record in records if isinstance(record.event, StepFinished)), default=-1)
    failures = [record.event for record in records if isinstance(record.event, Failed)]
    if any(isinstance(record.event, Preempted) for record in records):
        return _Outcome(ExitCode.PREEMPTED)
    final = [failure for failure in failures if failure.error not in _LOST_PEERS]
    if final:
        is_ours = hasattr(paceline.errors, final[0].error)
        return _Outcome(ExitCode.REFUSED if is_ours else ExitCode.FAILED)
    if any(isinstance(record.event, RunFinished) for record in records):
        return _Outcome(ExitCode.FINISHED)
    if signalled:  # before the first step there was nothing to save
        return _Outcome(ExitCode.FAILED if last_step >= 0 else ExitCode.PREEMPTED)
    return _Outcome(ExitCode.PEERS_LOST, reason or "the workers ended without a word", last_step)


def _silence_launcher() -> None:
    """Keep the elastic launcher from printing a page for each worker that fails: the log says it in a line."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _describe_exit(rank: int, code: int) -> str:
    if code < 0:
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    if code == ExitCode.PEERS_LOST:
        return f"rank {rank} lost its peers"
    return f"rank {rank} exited with code {code}"


def _tell(directory: Path, log_path: Path, attempt: int, event: Event) -> None:
    with EventLog(log_path, run=directory.name, rank=-1, epoch=attempt, clock=time.monotonic) as log:
        log.write(event, step=-1)
