"""`paceline train`: train a recipe, or resume a run."""

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import SettingsError
from paceline.launch import ExitCode
from paceline.launch.forking import prepare_to_fork
from paceline.launch.signals import leaving_when_asked


def train(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(help="A recipe's name (see `paceline recipes`), or your own: file.py:function."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Workers on this machine, one process each if no layout has more. [default: 2, or the layout's]"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the run; new without --go_on. [default: runs/RECIPE-n]")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Directory of a run to resume.")] = None,
    go_on: Annotated[
        bool,
        typer.Option(
            "--go_on",
            "--go-on",
            help="Start the run in --out, or resume it if it exists; for cluster jobs that may be submitted again.",
        ),
    ] = False,
    max_restarts: Annotated[int, typer.Option(help="Losses of workers without progress before giving up.")] = 3,
    min_workers: Annotated[
        int | None,
        typer.Option(
            "--min_workers",
            "--min-workers",
            help="Workers that must be left to go on without a restart from the checkpoint. [default: half of them]",
        ),
    ] = None,
    spares: Annotated[
        int, typer.Option(help="Additional workers that wait, with the model in memory, to replace one that is lost.")
    ] = 0,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS[:PORT]",
            help="Address of this machine at which `paceline agent` on other machines offers workers. [default: none]",
        ),
    ] = None,
    notice_s: Annotated[
        float | None,
        typer.Option(
            "--notice_s",
            "--notice-s",
            help="Let a worker that gets SIGTERM leave within this time, and the others go on. [default: all stop]",
        ),
    ] = None,
) -> None:
    """Train a model, with checkpoints, a log and a report.

    Every setting of the recipe can be overridden by its dotted path, such as
    `--num_steps 500 --model.width 128 --data.path my/texts`; `--help` after a recipe's name lists them.
    Under torchrun the same command trains on many machines.

    For a job that may be submitted again give `--out DIRECTORY --go_on`: it starts the run, or resumes it. Other
    options change the run from there on, as with --resume.

    Exit codes: 0 finished, 2 bad input, 75 stopped by a signal with a checkpoint saved, 1 failed.
    """
    from paceline.cli.overrides import parse_pairs

    overrides = parse_pairs(context.args)
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
    if max_restarts < 0:
        raise SettingsError(f"--max-restarts must be at least 0, but got {max_restarts}; 0 is for no restart")
    if min_workers is not None and min_workers < 1:
        raise SettingsError(f"--min_workers must be at least 1, but got {min_workers}; leave it out for half of them")
    if spares < 0:
        raise SettingsError(f"--spares must be at least 0, but got {spares}; 0 is for none")
    if notice_s is not None and not 0 < notice_s < math.inf:
        raise SettingsError(f"--notice_s must be more than 0 seconds, but got {notice_s}; leave it out for none")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from paceline.cli.train_worker import train_as_worker

        raise typer.Exit(train_as_worker(recipe, out, resume, overrides, go_on=go_on))
    with leaving_when_asked(ExitCode.PREEMPTED):
        prepare_to_fork()
        losses = {"max_restarts": max_restarts, "min_workers": min_workers, "num_spares": spares}
        options = losses | {"listen": parse_address(listen) if listen else None, "notice_s": notice_s}
        raise typer.Exit(_train_here(recipe, workers, out, resume, options, overrides, go_on=go_on))


def parse_address(text: str, *, needs_port: bool = False) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; without a port that is 0.

    Raises:
        SettingsError: It is no such address.
    """
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", text)
    if found is None or not int(found[3] or 0) < 65536 or (needs_port and not found[3]):
        form = "HOST:PORT" if needs_port else "HOST or HOST:PORT"
        raise SettingsError(f"an address must be {form}, with brackets around IPv6, but got {text}; give one like that")
    return found[1] or found[2], int(found[3] or 0)


def _train_here(
    recipe: str | None,
    workers: int | None,
    out: Path | None,
    resume: Path | None,
    options: dict[str, Any],
    overrides: list[tuple[str, str]],
    *,
    go_on: bool,
) -> int:
    from paceline.checkpoint.durable import WriterLock
    from paceline.cli.go_on import check_begun, is_begun
    from paceline.cli.prepare import prepare_new, prepare_resumed, taking_back, write_report
    from paceline.launch.local import launch
    from paceline.monitor.reader import last_traceback

    if workers is not None and workers < 1:
        raise SettingsError(f"--workers must be at least 1, but got {workers}")
    if go_on and recipe is not None and out is not None and is_begun(out):
        if not check_begun(recipe, out, overrides):
            return ExitCode.FINISHED
        resume = out
    with taking_back(resume):
        if resume is not None:
            lock = WriterLock(resume.absolute())
            lock.acquire()
            directory, file = prepare_resumed(resume, workers, overrides)
        else:
            assert recipe is not None
            directory, file = prepare_new(recipe, workers, out, overrides)
            lock = WriterLock(directory)
            lock.acquire()
        typer.echo(f"run: {directory}")
        code = launch(directory, file.num_processes, **options)
        lock.release()
    typer.echo(f"log: {directory / 'events.jsonl'}")
    if code is ExitCode.FINISHED:
        write_report(directory)
    if code is ExitCode.PREEMPTED:
        typer.echo(f"go on with: paceline train --resume {directory}")
    if code is ExitCode.FAILED:
        if trace := last_traceback(directory / "events.jsonl"):
            typer.echo(trace, err=True)
        typer.echo(f"what the workers printed: {directory / 'workers'}")
    return code
