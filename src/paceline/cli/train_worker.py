"""`paceline train` as a worker that torchrun started."""

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

from paceline.cli.go_on import check_begun, is_begun
from paceline.cli.overrides import apply_overrides
from paceline.cli.plans import use_plan
from paceline.cli.prepare import make_run, prepare_new, prepare_resumed, taking_back, write_report
from paceline.comm import Group, join
from paceline.comm.join import DEFAULT_TIMEOUT_S
from paceline.errors import PacelineError, SettingsError
from paceline.launch import ExitCode
from paceline.launch.worker import load_run, work
from paceline.monitor.live import LiveView
from paceline.planner.plan_file import Plan
from paceline.training.run_file import RunFile


def train_as_worker(
    recipe: str | None,
    out: Path | None,
    resume: Path | None,
    overrides: list[tuple[str, str]],
    *,
    plan: Path | None,
    go_on: bool,
) -> ExitCode:
    """Train as the rank in torchrun's environment; rank 0 makes the directory and shows the progress.

    Workers that torchrun restarted resume the run that they had begun.
    """
    # Every rank knows the recipe and its time-out before it knows the others.
    planned, _, overrides = use_plan(plan, None, None, overrides)
    run = make_run(recipe, overrides) if recipe else None
    offload = run.memory.offload if run else dict(overrides).get("memory.offload")
    group = join(
        timeout_s=run.timeout_s if run else DEFAULT_TIMEOUT_S,
        device="cpu" if offload == "parameters" else None,
        hang_timeout_s=run.hang_timeout_s if run else None,
    )
    is_first = group.rank == 0
    with ExitStack() as resuming:

        def prepare() -> tuple[Path, RunFile] | None:
            begun = out if go_on and out is not None and is_begun(out) else resume
            resuming.enter_context(taking_back(begun))
            return _prepare(group, recipe, out, resume, overrides, plan=planned, go_on=go_on)

        agreed = _agree_run(group, prepare)
        if agreed is None:
            group.close()
            return ExitCode.FINISHED
        directory, file = agreed
        with LiveView().following(directory / "events.jsonl") if is_first else nullcontext():
            code = work(directory, file, group, group.epoch)
    if is_first and code in (ExitCode.FINISHED, ExitCode.BUDGET_SPENT):
        write_report(directory)
    return code


def _agree_run(group: Group, prepare: Callable[[], tuple[Path, RunFile] | None]) -> tuple[Path, RunFile] | None:
    """Prepare the run on rank 0, and return it on every rank; None if it is finished."""
    answer: dict[str, object] | None = None
    refused: PacelineError | None = None
    if group.rank == 0:
        try:
            prepared = prepare()
            answer = {"directory": str(prepared[0]), "file": prepared[1].model_dump(mode="json")} if prepared else {}
        except PacelineError as error:
            refused = error
    answer = group.gather_documents(answer, name="run")[0]
    if refused is not None:
        raise refused
    if answer is None:
        raise SettingsError("rank 0 refused to start the run; its own message says why")
    return (Path(str(answer["directory"])), RunFile.model_validate(answer["file"])) if answer else None


def _prepare(
    group: Group,
    recipe: str | None,
    out: Path | None,
    resume: Path | None,
    overrides: list[tuple[str, str]],
    *,
    plan: Plan | None,
    go_on: bool,
) -> tuple[Path, RunFile] | None:
    if go_on and recipe is not None and out is not None and is_begun(out):
        if not check_begun(recipe, out, overrides):
            return None
        resume = out
    if resume is not None:
        run = apply_overrides(load_run(RunFile.load(resume)), overrides)
        return prepare_resumed(resume, run.count_workers(group.size), overrides, plan)
    assert recipe is not None
    # torchrun's own process, which outlives the workers that it restarts, distinguishes this job from earlier ones.
    launch = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {socket.gethostname()} {os.getppid()}"
    is_restart = group.epoch > 1 or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if is_restart and (begun := _find_begun(out, launch)) is not None:
        return begun, RunFile.load(begun)
    workers = make_run(recipe, overrides).count_workers(group.size)
    return prepare_new(recipe, workers, out, overrides, launch=launch, plan=plan)


def _find_begun(out: Path | None, launch: str) -> Path | None:
    """Return the directory of the run that this job began before it was restarted."""
    candidates = [out.absolute()] if out is not None else list(Path("runs").absolute().glob("*/"))
    for directory in candidates:
        if (directory / "run.json").is_file() and RunFile.load(directory).launch == launch:
            return directory
    return None
