"""Preparation of a run: settings are resolved and checked, and its directory is made."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import typer
from pydantic import ValidationError

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.cli.changes import list_differences
from paceline.cli.overrides import apply_overrides
from paceline.cli.plans import keep_plan
from paceline.data.base import Splits
from paceline.errors import MissingExtraError, SettingsError, StorageError, storing
from paceline.launch.worker import load_run
from paceline.memory import available_bytes, guess_device
from paceline.memory.absent_group import AbsentGroup
from paceline.monitor.events import MemoryEstimated, RunFinished, RunStarted
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log, select, summarise
from paceline.planner.plan_file import Plan
from paceline.recipes import RECIPES, find_recipe
from paceline.registry import explain
from paceline.training.best import BestSoFar
from paceline.training.budget import check_resumed
from paceline.training.loading import make_loader
from paceline.training.memory_fit import check_fit
from paceline.training.rehearsal import RehearsalError, check_batch_norm_sizes, check_workers, outline
from paceline.training.run import Run
from paceline.training.run_file import RunFile


def make_run(recipe: str, overrides: list[tuple[str, str]]) -> Run:
    """Return the run of a recipe with overrides applied.

    Raises:
        SettingsError: The recipe is unknown or returns no run, or an override does not fit.
    """
    function = find_recipe(recipe)
    try:
        run = function()
    except ValidationError as error:
        raise SettingsError(f"recipe {recipe} must return a valid run, but: {explain(error)}") from error
    if not isinstance(run, Run):
        raise SettingsError(f"recipe {recipe} must return a paceline.Run, but got {type(run).__name__}")
    return apply_overrides(run, overrides)


def make_resumed(directory: Path, overrides: list[tuple[str, str]]) -> Run:
    """Return the run in a directory with overrides applied.

    Raises:
        SettingsError: The directory holds no run, or an override does not fit.
    """
    return apply_overrides(load_run(RunFile.load(directory)), overrides)


def changes_run(directory: Path, num_workers: int | None, overrides: list[tuple[str, str]]) -> bool:
    """Return whether a number of workers and overrides change the run in a directory.

    Raises:
        SettingsError: The directory holds no run, or an override does not fit.
    """
    file = RunFile.load(directory)
    begun = load_run(file)
    return num_workers not in (None, file.num_workers) or apply_overrides(begun, overrides) != begun


def prepare_new(
    recipe: str,
    num_workers: int | None,
    out: Path | None,
    overrides: list[tuple[str, str]],
    *,
    launch: str = "",
    plan: Plan | None = None,
) -> tuple[Path, RunFile]:
    """Make the directory of a new run, by default with two workers, or as many as its layout needs.

    Raises:
        SettingsError: `out` exists and is not empty, or settings are invalid.
    """
    recipe = absolute_recipe(recipe)
    run = make_run(recipe, overrides)
    if plan is not None:
        plan.check(run, recipe)
    if num_workers is None:
        num_workers = run.layout.default_workers
    if run.num_threads is None:
        cores = len(os.sched_getaffinity(0))
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_workers * run.layout.ranks_of_worker))
        run = run.model_copy(update={"num_threads": max(1, cores // local_ranks)})
    fitted = run.fit_workers(num_workers)
    splits = check_workers(fitted, num_workers)
    absent = AbsentGroup(0, num_workers, torch.device("cpu"))
    check_batch_norm_sizes(fitted, splits, make_loader(fitted, splits, absent))
    if run.initial is not None:
        with contextlib.suppress(RehearsalError):  # workers will tell
            run.initial.check(outline(run.model, splits))
    needed = _check_memory(fitted, splits, num_workers)
    file = RunFile(recipe=recipe, num_workers=num_workers, launch=launch, run=run.model_dump(mode="json"))
    is_made = out is None or not out.exists()
    directory = _make_directory(out, recipe)
    try:
        file.save(directory)
    except StorageError:
        if is_made:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise
    _log_memory(directory, needed)
    keep_plan(directory, plan)
    return directory, file


def prepare_resumed(
    directory: Path, num_workers: int | None, overrides: list[tuple[str, str]], plan: Plan | None = None
) -> tuple[Path, RunFile]:
    """Prepare to resume a run, with another number of workers or other settings if requested, which are printed.

    Raises:
        SettingsError: `directory` holds no run, the run is finished, or settings are invalid.
        BudgetError: The budget of the run is spent.
    """
    directory = directory.absolute()
    file = RunFile.load(directory)
    begun = load_run(file)
    run = apply_overrides(begun, overrides)
    if plan is not None:
        plan.check(run, file.recipe)
    workers = num_workers or file.num_workers
    has_checkpoint = bool(CheckpointStore(directory / "checkpoints").list_checkpoints())
    if run.initial not in (None, begun.initial) and has_checkpoint:
        raise SettingsError(
            f"a resumed run must go on with its own weights, but got --initial {run.initial.path} for {directory}, "
            "which has a checkpoint; leave it out, or begin a new run in another --out"
        )
    check_resumed(run.budget, run.site, directory / "events.jsonl")
    fitted = run.fit_workers(workers)
    splits = check_workers(fitted, workers)
    needed = _check_memory(fitted, splits, workers)
    if reason := find_early_end(directory, run):
        raise SettingsError(
            f"a resumed run must have evaluations left, but {directory} has ended: {reason}; give more --stop_after, "
            "or none, to train on"
        )
    num_steps = run.count_steps(splits)
    if (step := find_last_step(directory, num_steps)) is not None:
        more = f"--num_steps more than {step}" if run.num_epochs is None else "more --num_epochs"
        raise SettingsError(
            f"a resumed run must have steps left, but {directory} is at step {step} of {num_steps}; give {more} to "
            "train on"
        )
    changes = list_differences(begun, run)
    if workers != file.num_workers:
        changes["workers"] = (file.num_workers, workers)
    for name, (before, now) in changes.items():
        typer.echo(f"changed by the command line: {name} from {before} to {now}")
    resumed = file.model_copy(update={"num_workers": workers, "run": run.model_dump(mode="json")})
    if resumed != file:
        resumed.save(directory)
    _log_memory(directory, needed)
    keep_plan(directory, plan, is_changed=resumed != file)
    return directory, resumed


def _check_memory(run: Run, splits: Splits, num_workers: int) -> MemoryEstimated | None:
    """Return the memory that each rank needs, to be logged; None if it fits by far.

    Raises:
        SettingsError: The run does not fit; the message names changes that would.
    """
    num_ranks = num_workers * run.layout.ranks_of_worker
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks + run.sync.num_server_processes))
    device = guess_device(num_here)
    available = available_bytes(device, num_here)
    needed = check_fit(run, splits, num_ranks, device, available)
    if needed is None:
        return None
    bytes_of: dict[str, float] = {category: float(num_bytes) for category, num_bytes in needed.bytes_of.items()}
    return MemoryEstimated(peak_bytes=needed.peak_bytes, bytes_of=bytes_of, available_bytes=available)


def _log_memory(directory: Path, event: MemoryEstimated | None) -> None:
    """Write the estimate into the log of a run."""
    if event is not None:
        with EventLog(directory / "events.jsonl", run=directory.name, rank=-1, epoch=-1) as log:
            log.write(event, step=-1)


def find_last_step(directory: Path, num_steps: int) -> int | None:
    """Return the step at which a run of `num_steps` has finished; None if it has steps left."""
    newest = CheckpointStore(directory / "checkpoints").list_checkpoints()
    return step if newest and (step := _step_of(newest[0])) >= num_steps and _is_finished(directory) else None


def find_early_end(directory: Path, run: Run) -> str:
    """Return the reason for which `stop_after` ended a run before its last step; empty if it did not."""
    newest = CheckpointStore(directory / "checkpoints").list_checkpoints()
    if run.stop_after is None or not newest or not _is_finished(directory):
        return ""
    best = BestSoFar(run.keep_best, run.stop_after)
    best.load(Checkpoint.open(newest[0]).read_document()["best"])
    return best.end_reason


def _is_finished(directory: Path) -> bool:
    log = directory / "events.jsonl"  # missing if the run was killed before its first event
    return log.is_file() and any(select(read_log(log), RunFinished))


@contextlib.contextmanager
def taking_back(directory: Path | None) -> Iterator[None]:
    """Inside, the run in `directory` is resumed, perhaps with other settings; if it does not start, they are undone."""
    if directory is None:
        yield
        return
    RunFile.load(directory)  # or it is refused
    older, num_starts = RunFile.list_older(directory), _count_starts(directory)
    try:
        yield
    finally:
        changed = [path for path in RunFile.list_older(directory) if path not in older]
        if changed and _count_starts(directory) == num_starts:
            changed[0].replace(directory / "run.json")


def _count_starts(directory: Path) -> int:
    log = directory / "events.jsonl"  # missing if the run was killed before its first event
    return len(select(read_log(log), RunStarted)) if log.is_file() else 0


def write_report(directory: Path) -> None:
    """Print what a run has used, write its report and print its path."""
    from paceline.monitor.report import write_report
    from paceline.monitor.usage import describe_usage

    for sentence in describe_usage(summarise(read_log(directory / "events.jsonl"))):
        typer.echo(sentence)
    try:
        picture, page = write_report(directory)
    except (MissingExtraError, StorageError) as error:  # the run is finished nevertheless
        typer.echo(f"report: none, {error}")
        return
    typer.echo(f"report: {page}\npicture: {picture}")


def absolute_recipe(recipe: str) -> str:
    """Return the recipe, with the absolute path of its file, if it has one."""
    if recipe in RECIPES:
        return recipe
    file, separator, function = recipe.rpartition(":") if ":" in recipe else (recipe, ":", "run")
    return f"{Path(file).resolve()}{separator}{function}" if file.endswith(".py") else recipe


def check_new(out: Path) -> None:
    """Raise `SettingsError` if a directory is in use."""
    directory = out.absolute()
    if directory.exists() and (not directory.is_dir() or not _is_unused(directory)):
        is_run = (directory / "run.json").is_file()
        advice = "choose another, or go on with the run there by --go_on" if is_run else "choose another"
        raise SettingsError(f"--out must be a new or empty directory, but {directory} is neither; {advice}")


def _make_directory(out: Path | None, recipe: str) -> Path:
    if out is not None:
        directory = out.absolute()
        check_new(directory)
        with storing(directory):
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise SettingsError(
                    f"--out must be a directory that can be made, but got {directory}: {error.strerror}; choose another"
                ) from error
        return directory
    title = re.sub(r"\W+", "_", Path(recipe.rpartition(":")[0] or recipe).stem)
    number = 1
    while True:
        directory = Path("runs").absolute() / f"{title}-{number}"
        with storing(directory), contextlib.suppress(FileExistsError):
            directory.mkdir(parents=True)
            return directory
        number += 1


def _is_unused(directory: Path) -> bool:
    """Return whether the directory is empty, except for a first file that a killed run was writing."""
    return all(path.name.startswith(".run.json.") for path in directory.iterdir())


def _step_of(checkpoint: Path) -> int:
    match = re.search(r"step-(\d+)", checkpoint.name)
    assert match is not None
    return int(match[1])
