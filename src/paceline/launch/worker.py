"""One worker process: joins the others, trains, and says in the log how it ended."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from paceline.comm import Group
from paceline.comm.join import DEFAULT_TIMEOUT_S, default_device, open_store
from paceline.comm.local_group import LocalGroup
from paceline.comm.membership import leave_on_sigterm
from paceline.comm.progress import PROGRESS
from paceline.comm.stacks import register_stacks
from paceline.elastic import Evicted, Member, StoreMember
from paceline.errors import BudgetError, PacelineError, SettingsError, storing
from paceline.launch.exit_codes import ExitCode, find_exit_code, leave
from paceline.launch.launcher_watch import RECORD, LauncherWatch
from paceline.launch.process_record import ProcessRecord
from paceline.launch.processes import ACCESS_FILE
from paceline.monitor.events import Warned
from paceline.monitor.log import EventLog
from paceline.recipes import find_recipe
from paceline.registry import explain
from paceline.replica.step_result import UnusedParametersWarning
from paceline.training.log_events import log_failure
from paceline.training.loop import serve, train
from paceline.training.reforming import can_reform, find_fixed
from paceline.training.run import Run
from paceline.training.run_file import RunFile


def load_run(file: RunFile) -> Run:
    """Return the run of a file, after importing what its recipe registers.

    Raises:
        SettingsError: The recipe is gone, or the settings no longer fit it.
    """
    find_recipe(file.recipe)
    try:
        return Run.model_validate(file.run)
    except ValidationError as error:
        raise SettingsError(
            f"the settings of this run must fit the recipe {file.recipe}, but: {explain(error)}"
        ) from error


def work(
    directory: Path, file: RunFile, group: Group, attempt: int, *, rank: int | None = None, member: Member | None = None
) -> ExitCode:
    """Train as one worker of `group` and return how it ended; whatever goes wrong is in the log.

    Args:
        directory: Directory of the run.
        file: File of the run.
        group: The workers; with a `member` this worker alone, until it is taken in.
        attempt: Epoch of the log.
        rank: Rank in the log; None for that in the group.
        member: Connection to the supervisor, if workers may change.
    """
    with storing(directory / "events.jsonl"):
        directory.mkdir(parents=True, exist_ok=True)
        log = EventLog(
            directory / "events.jsonl",
            run=directory.name,
            rank=group.rank if rank is None else rank,
            epoch=attempt,
        )
    with log, _warnings_in(log):
        try:
            run = load_run(file)
        except (Exception, SystemExit) as error:
            log_failure(log, error)
            group.close(error)
            return _code_of(error)
        torch.set_num_threads(run.num_threads or _count_threads())
        try:
            finished = _take_part(run, directory, group, log, file.recipe, member)
        except Evicted:
            return ExitCode.FINISHED
        except BudgetError:
            group.close()
            return ExitCode.BUDGET_SPENT
        except (Exception, SystemExit) as error:  # train has told the log
            group.close(error)
            return _code_of(error)
    group.close()
    return ExitCode.FINISHED if finished else ExitCode.PREEMPTED


def _take_part(
    run: Run, directory: Path, world: Group, log: EventLog, recipe: str, member: Member | None = None
) -> bool:
    """Train, or on one of the last ranks serve where servers have processes of their own."""
    num_servers = run.sync.num_server_processes
    if not num_servers:
        return train(run, directory, world, log, recipe=recipe, member=member)
    num_workers = world.size - num_servers
    if num_workers < 1:
        raise SettingsError(
            f"there must be processes beside the {num_servers} that serve, but got {world.size}; start more"
        )
    world.barrier(name="workers and servers are here")  # from now on a server outlives signals
    if world.rank >= num_workers:
        serve(run, world, log)
        return True
    return train(run, directory, world.subgroup(range(num_workers), "workers"), log, recipe=recipe, world=world)


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker that a launcher gives.

    Args:
        launcher: Number of the launcher.
        launcher_timeout_s: Time for which the worker trains on without a launcher, before it saves and ends.
        leaves_on_sigterm: Whether SIGTERM to this worker lets it leave, and does not stop all.
    """

    launcher: int = 0
    launcher_timeout_s: float = 0.0
    leaves_on_sigterm: bool = False


def work_for_launcher(directory: Path, attempt: int, name: str, *, options: WorkerOptions) -> None:
    """Be a worker that a local launcher started; where the run is not finished, end the process with the code for that.

    The launcher reads in the log that it was preempted.

    Args:
        directory: Directory of the run.
        attempt: Epoch of the log, until the worker is taken in.
        name: Name of the worker.
        options: Options of the worker.
    """
    number, timeout_s = signal.SIGINT if options.leaves_on_sigterm else signal.SIGTERM, options.launcher_timeout_s
    watch = LauncherWatch(directory / "workers", name, options.launcher, timeout_s=timeout_s, signal_number=number)
    code = ExitCode.PEERS_LOST
    if watch.begin():
        code = _join_and_work(directory, attempt, name, options, watch.is_abandoned)
    watch.end(code)
    if code is not ExitCode.FINISHED:
        leave(code)


def work_for_agent(directory: Path, attempt: int, name: str, *, options: WorkerOptions) -> None:
    """Be a worker that the agent of another machine started; it ends at once with the agent."""
    threading.Thread(target=_end_with_agent, daemon=True).start()
    record, path = ProcessRecord.of_this_process(options.launcher), directory / "workers" / f"{name}{RECORD}"
    with contextlib.suppress(OSError):  # a full disk: only the process that forked this one learns how it ends
        record.save(path)
    code = _join_and_work(directory, attempt, name, options, lambda: False)
    with contextlib.suppress(OSError):
        replace(record, code=code).save(path)
    if code is not ExitCode.FINISHED:
        leave(code)


def _join_and_work(
    directory: Path, attempt: int, name: str, options: WorkerOptions, is_abandoned: Callable[[], bool]
) -> ExitCode:
    rank, absence_s = int(os.environ["RANK"]), options.launcher_timeout_s
    connect = partial(open_store, access_file=directory / "workers" / ACCESS_FILE)
    try:
        file = RunFile.load(directory)
        offload = file.run.get("memory", {}).get("offload")
        register_stacks(directory / "workers" / f"rank{rank}.stack")
        PROGRESS.hang_timeout_s = file.run.get("hang_timeout_s")
        # What is exchanged is where the parameters are.
        device = torch.device("cpu") if offload == "parameters" else default_device()
        run, num_workers = load_run(file), int(os.environ["WORLD_SIZE"])
        obstacle = can_reform(run, num_workers) if device.type == "cpu" else "going on from memory is for CPUs only yet"
        member = StoreMember(
            connect,
            name,
            obstacle=obstacle,
            fixed=find_fixed(run),
            connect_group=partial(connect, patience_s=absence_s),
            is_abandoned=is_abandoned,
            absence_s=absence_s,
        )
        if not obstacle:
            if options.leaves_on_sigterm:
                leave_on_sigterm(member.leave)
            return work(directory, file, LocalGroup(device=device), attempt, rank=rank, member=member)
        timeout_s = file.run.get("timeout_s", DEFAULT_TIMEOUT_S)
        group = member.open_group(member.next_view(timeout_s), device, timeout_s, "auto")
    except Exception as error:
        with EventLog(directory / "events.jsonl", run=directory.name, rank=rank, epoch=attempt) as log:
            log_failure(log, error)
        return _code_of(error)
    return work(directory, file, group, attempt)


def _code_of(error: BaseException) -> ExitCode:
    with contextlib.suppress(OSError):  # of a full disk, which people are told of in other words
        if isinstance(error, PacelineError):
            print(f"paceline: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
    return find_exit_code(type(error))


def _end_with_agent() -> None:
    """End this worker when its agent is gone: the others count it as lost, and go on."""
    agent = multiprocessing.parent_process()
    assert agent is not None
    agent.join()
    print("paceline: the agent that started this worker is gone, so the worker ends", file=sys.stderr, flush=True)
    os._exit(ExitCode.PEERS_LOST)


def _count_threads() -> int:
    """Return this worker's part of the host's cores."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


@contextlib.contextmanager
def _warnings_in(log: EventLog) -> Iterator[None]:
    """Write Python's warnings to the log too; unused parameters have an event of their own there."""
    show = warnings.showwarning

    def show_and_log(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        show(message, category, *args, **kwargs)
        if not issubclass(category, UnusedParametersWarning):
            log.write(Warned(message=f"{category.__name__}: {message}"), step=-1)

    warnings.showwarning = show_and_log
    try:
        yield
    finally:
        warnings.showwarning = show
