"""`paceline train`: train a recipe, or resume a run."""

import os
from pathlib import Path
from typing import Any

import typer

from paceline.cli import train_options as options
from paceline.errors import SettingsError
from paceline.launch import ExitCode
from paceline.launch.forking import prepare_to_fork
from paceline.launch.imports import without_collections
from paceline.launch.signals import Leaving, leaving_when_asked


def train(
    context: typer.Context,
    recipe: options.Recipe = None,
    workers: options.Workers = None,
    out: options.Out = None,
    resume: options.Resume = None,
    plan: options.Plan = None,
    go_on: options.GoOn = False,
    max_restarts: options.MaxRestarts = 3,
    min_workers: options.MinWorkers = None,
    spares: options.Spares = 0,
    listen: options.Listen = None,
    notice_s: options.NoticeS = None,
    launcher_timeout_s: options.LauncherTimeoutS = 60.0,
    scale_policy: options.ScalePolicyName = None,
    scale_interval_s: options.ScaleIntervalS = 60.0,
    prices: options.Prices = None,
) -> None:
    """Train a model, with checkpoints, a log and a report.

    Every setting of the recipe can be overridden by its dotted path, such as
    `--num_steps 500 --model.width 128 --data.path my/texts`; `--help` after a recipe's name lists them.
    Under torchrun the same command trains on many machines.

    For a job that may be submitted again give `--out DIRECTORY --go_on`: it starts the run, or resumes it. Other
    options change the run from there on, as with --resume.

    Exit codes: 0 finished, 2 bad input, 75 stopped by a signal with a checkpoint saved, 77 the same at the end of the
    budget, 1 failed.
    """
    from paceline.cli.overrides import parse_pairs

    overrides = parse_pairs(context.args)
    _check_start(recipe, out, resume, go_on=go_on)
    options.check_numbers(max_restarts, min_workers, spares, notice_s, scale_interval_s, launcher_timeout_s)
    if prices is not None and scale_policy is None:
        raise SettingsError(f"--prices must be given with --scale_policy, but got {prices} alone; name a policy")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        with without_collections():
            from paceline.cli.train_worker import train_as_worker

        raise typer.Exit(train_as_worker(recipe, out, resume, overrides, plan=plan, go_on=go_on))
    with leaving_when_asked(ExitCode.PREEMPTED) as leaving:
        prepare_to_fork()
        losses = {"max_restarts": max_restarts, "min_workers": min_workers, "num_spares": spares}
        address = options.parse_address(listen) if listen else None
        scaling = (scale_policy, scale_interval_s, prices) if scale_policy is not None else None
        changes = {
            "listen": address,
            "notice_s": notice_s,
            "scaling": scaling,
            "launcher_timeout_s": launcher_timeout_s,
        }
        code = _train_here(recipe, workers, out, resume, losses, changes, overrides, leaving, plan=plan, go_on=go_on)
        raise typer.Exit(code)


def _check_start(recipe: str | None, out: Path | None, resume: Path | None, *, go_on: bool) -> None:
    if go_on and (recipe is None or out is None or resume is not None):
        found = "--resume" if resume is not None else "no recipe" if recipe is None else "no --out"
        raise SettingsError(
            f"--go_on must be given with a recipe and --out DIRECTORY, and starts or resumes the run there, but got "
            f"{found}; write paceline train RECIPE --out DIRECTORY --go_on, or --resume RUN without --go_on"
        )
    if (recipe is None) == (resume is None):
        found = "neither; `paceline recipes` lists the recipes" if recipe is None else "both; leave one of them out"
        raise SettingsError(f"either a recipe or --resume RUN must be given, but got {found}")
    if resume is not None and out is not None:
        raise SettingsError(
            f"--resume goes on in the run's own directory, but got --out {out}; leave --out out, or begin a new run "
            "from these weights with --initial RUN"
        )


def _train_here(
    recipe: str | None,
    workers: int | None,
    out: Path | None,
    resume: Path | None,
    losses: dict[str, Any],
    changes: dict[str, Any],
    overrides: list[tuple[str, str]],
    leaving: Leaving,
    *,
    plan: Path | None,
    go_on: bool,
) -> int:
    with without_collections():
        from paceline.cli.go_on import check_begun, is_begun, is_reported, tell_finished
        from paceline.cli.plans import AUTO, use_plan
    from paceline.cli.prepare import (
        changes_run,
        check_new,
        make_resumed,
        make_run,
        prepare_new,
        prepare_resumed,
        taking_back,
    )
    from paceline.launch.changes import Changes
    from paceline.launch.left_run import end_left_workers, find_left_run
    from paceline.launch.local import check_min_workers, launch
    from paceline.launch.place import acquire_run
    from paceline.launch.scaling import PolicySettings
    from paceline.training.run_file import RunFile

    if changes["scaling"] is not None:
        changes["scaling"] = PolicySettings(*changes["scaling"])
    ways = Changes(**changes)
    has_begun = go_on and out is not None and is_begun(out)
    if workers is not None and workers < 1:
        raise SettingsError(f"--workers must be at least 1, but got {workers}")
    if plan == AUTO and out is not None and not has_begun:
        check_new(out)  # before it takes a minute
    planned, workers, overrides = use_plan(None if has_begun and plan == AUTO else plan, recipe, workers, overrides)
    if workers is not None:
        check_min_workers(losses["min_workers"], workers)
    if has_begun and recipe is not None and out is not None:
        if not check_begun(recipe, out, overrides):
            return ExitCode.FINISHED
        resume = out
    ways.check(lambda: make_run(recipe or "", overrides) if resume is None else make_resumed(resume, overrides))
    with taking_back(resume):
        left = None
        if resume is not None:
            lock = acquire_run(resume.absolute())
            left = find_left_run(resume.absolute()) if not changes_run(resume, workers, overrides) else None
            if left is not None:
                directory, file = resume.absolute(), RunFile.load(resume)
            else:
                end_left_workers(resume.absolute())
                if not is_reported(resume) and tell_finished(resume, make_resumed(resume, overrides)):
                    lock.release()  # its launcher was lost, or asked to stop
                    return ExitCode.FINISHED
                directory, file = prepare_resumed(resume, workers, overrides, planned)
        else:
            assert recipe is not None
            directory, file = prepare_new(recipe, workers, out, overrides, plan=planned)
            lock = acquire_run(directory)
        typer.echo(f"run: {directory}")

        def tell_end(code: ExitCode) -> None:
            leaving.code = code
            if code is ExitCode.FINISHED:
                leaving.words = f"after the run was finished; its report: paceline train --resume {directory}"

        code = launch(directory, file.num_processes, changes=ways, left=left, tell_end=tell_end, **losses)
        lock.release()
    _report_end(directory, code, leaving)
    return code


def _report_end(directory: Path, code: int, leaving: Leaving) -> None:
    """Write the report of a run that has ended, and say where everything is, and how to go on."""
    from paceline.cli.prepare import write_report
    from paceline.monitor.reader import last_traceback

    typer.echo(f"log: {directory / 'events.jsonl'}")
    if code in (ExitCode.FINISHED, ExitCode.BUDGET_SPENT):
        write_report(directory)
        leaving.words = "after the run was finished" if code is ExitCode.FINISHED else "after its budget was spent"
    if code is ExitCode.BUDGET_SPENT:
        typer.echo(f"go on with a larger --budget.NAME: paceline train --resume {directory}")
    if code is ExitCode.PREEMPTED:
        typer.echo(f"go on with: paceline train --resume {directory}")
    if code is ExitCode.FAILED:
        if trace := last_traceback(directory / "events.jsonl"):
            typer.echo(trace, err=True)
        typer.echo(f"what the workers printed: {directory / 'workers'}")
