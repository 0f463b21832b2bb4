"""The runs of `paceline compare`: each is trained, or resumed, unless it is finished."""

import statistics
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import typer

from paceline.benchmarks import COMPARISONS, print_table, write_files
from paceline.benchmarks.comparison import Outcomes, Overrides, RunOutcome
from paceline.benchmarks.link_price import Link, price_training
from paceline.benchmarks.way_rows import Price, WayRow, advise, describe_way, sort_rows
from paceline.cli.changes import flatten_settings
from paceline.cli.prepare import make_run, prepare_new
from paceline.errors import PacelineError, SettingsError
from paceline.launch import ExitCode
from paceline.launch.local import launch
from paceline.launch.worker import load_run
from paceline.monitor.formatting import one_line
from paceline.monitor.live import LiveView
from paceline.monitor.reader import RunSummary, read_log, summarise
from paceline.replica.coded_steps import choose_coding
from paceline.training.rehearsal import outline
from paceline.training.run import Run
from paceline.training.run_file import RunFile

_NUM_EVALUATIONS = 20
"""Points of a curve, at least: equal loss is looked for on it."""
_NUM_COMPUTE_STEPS = 30
_NUM_WARM_UP = 10
_WHOLE = [("stop_after", "none")]
"""Overrides of all runs: they take equally many steps."""


class _WayError(PacelineError):
    """A way cannot be trained, and the message says why; `is_refused` if its settings do not fit the run."""

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


@dataclass(frozen=True)
class RunsToCompare:
    """The same training in several ways, each in directories of its own."""

    what: str
    """Name of the comparison."""
    recipe: str
    workers: int
    directory: Path
    given: Overrides
    """Overrides of all runs."""
    names: list[str] | None
    """Ways to compare with the reference; None for all."""
    link: Link | None
    """Link that times are priced for; None for those of the runs."""

    @cached_property
    def run(self) -> Run:
        """The run that all ways change."""
        return make_run(self.recipe, self.given)

    @cached_property
    def ways(self) -> dict[str, Overrides]:
        """The ways, the reference first."""
        interval = max(1, self._num_steps // _NUM_EVALUATIONS)  # needs the run, whose file may register more ways
        chosen = COMPARISONS[self.what](self.names, host_size=None if self.link is None else 1)
        is_fine = 0 < self.run.evaluate_interval <= interval or any(
            path == "evaluate_interval" for path, _ in self.given
        )
        curve = [] if is_fine else [("evaluate_interval", str(interval))]
        return {name: [*self.given, *curve, *way] for name, way in chosen.items()}

    @cached_property
    def _num_steps(self) -> int:
        return self.run.num_steps or self.run.count_steps(self.run.open_data())

    def show(self, seeds: int, within: float, json: Path | None, markdown: Path | None) -> bool:
        """Train all, print the table and the advice, and write the requested files; return whether no way failed."""
        compute_s = None
        self._check_same(seeds)
        if self.link is not None:
            compute_s = self._measure_compute()
            typer.echo(f"computing of a step, one worker of {self.workers} alone: {1e3 * compute_s:.4g} ms")
        outcomes, failures = self._train_all(seeds)
        reference = next(iter(self.ways))
        rows = sort_rows(
            [
                describe_way(name, outcomes[name], outcomes[reference], self._price(name, compute_s), within)
                if name in outcomes
                else WayRow(way=name, is_reference=False, num_seeds=0, failure=one_line(str(failures[name])))
                for name in self.ways
            ]
        )
        place = "on this machine" if self.link is None else str(self.link)
        advice = advise(rows, place, within)
        print_table(rows)
        typer.echo(f"\n{advice}")
        write_files(rows, json, markdown, advice)
        return all(failure.is_refused and self.names is None for failure in failures.values())

    def _train_all(self, seeds: int) -> tuple[dict[str, Outcomes], dict[str, _WayError]]:
        """Return the outcomes of each way by seed, and the reason of each that failed."""
        outcomes: dict[str, list[RunOutcome]] = {name: [] for name in self.ways}
        failures: dict[str, _WayError] = {}
        for seed in range(seeds):
            for name in self.ways:
                if name in failures:
                    continue
                directory = self._place(name, seed)
                try:
                    outcome = _train(directory, self.recipe, self.workers, self._list_overrides(name, seed))
                except _WayError as error:
                    if name == next(iter(self.ways)):
                        raise SettingsError(
                            f"the reference of a comparison must finish, but {directory} did not: {error}"
                        ) from error
                    failures[name] = error
                    typer.echo(f"{name}, seed {seed}, failed in {directory}: {error}")
                    continue
                outcomes[name].append(outcome)
                typer.echo(f"{name}, seed {seed}: held-out loss {outcome.loss:.4f} after {outcome.curve[-1][0]} steps")
        return {name: each for name, each in outcomes.items() if name not in failures}, failures

    def _measure_compute(self) -> float:
        """Return the time of computing in a step: that of a run of one worker, with one worker's part of a batch.

        It is the lower quartile over steps: what other programs of this machine take is no part of it.
        """
        steps = [("num_epochs", "none"), ("num_steps", str(_NUM_COMPUTE_STEPS)), *_WHOLE]
        apart = [
            ("evaluate_interval", "0"),
            ("evaluate_samples", "1"),
            ("checkpoint_interval", "0"),
            ("keep_best", "none"),
        ]
        share = [("global_batch", str(-(-self.run.global_batch // self.workers))), ("shares", "none")]
        overrides = [*self.given, *steps, *apart, *share]
        directory = self.directory / f"computing-of-1-in-{self.workers}"
        _check_same(directory, self.recipe, 1, overrides)
        try:
            steps_s = [step.event.duration_s for step in _finish(directory, self.recipe, 1, overrides).steps]
        except _WayError as error:
            raise SettingsError(
                f"--hosts must be given for a run that one worker can train, to measure its computing, but: {error}; "
                "leave out --hosts and --bandwidth"
            ) from error
        return statistics.quantiles(steps_s[_NUM_WARM_UP:], n=4)[0]

    def _price(self, name: str, compute_s: float | None) -> Price | None:
        if self.link is None or compute_s is None:
            return None
        run = make_run(self.recipe, self.ways[name])
        module = outline(run.model, run.open_data())
        parameters = {path: parameter for path, parameter in module.named_parameters() if parameter.requires_grad}
        fitted = run.sync.fit_length(self._num_steps)
        rule = choose_coding(fitted, run.optimizer.build(module), parameters, run.precision, run.landing, run.layout)
        return partial(price_training, rule, [p.shape for p in parameters.values()], self.link, compute_s)

    def _place(self, name: str, seed: int) -> Path:
        return self.directory / f"{name.replace(' ', '-')}-{seed}"

    def _list_overrides(self, name: str, seed: int) -> Overrides:
        return [*self.ways[name], *_WHOLE, ("seed", str(seed))]

    def _check_same(self, seeds: int) -> None:
        for seed in range(seeds):
            for name in self.ways:
                _check_same(self._place(name, seed), self.recipe, self.workers, self._list_overrides(name, seed))


def _check_same(directory: Path, recipe: str, workers: int, overrides: Overrides) -> None:
    """Raise if `directory` holds a run with other settings; the number of threads may be the machine's."""
    if not (directory / "run.json").exists():
        return
    file = RunFile.load(directory)
    there = {**flatten_settings(load_run(file).model_dump(mode="json")), "workers": file.num_workers}
    here = {**flatten_settings(make_run(recipe, overrides).model_dump(mode="json")), "workers": workers}
    if here["num_threads"] is None:
        here["num_threads"] = there["num_threads"]
    absent = object()
    differing = [name for name in {**here, **there} if here.get(name, absent) != there.get(name, absent)]
    if differing:
        words = ", ".join(f"{name} is {there.get(name)} there and {here.get(name)} here" for name in differing)
        raise SettingsError(
            f"a run that is compared must have the requested settings, but in {directory} {words}; "
            "give the same again, or another --out"
        )


def _train(directory: Path, recipe: str, workers: int, overrides: Overrides) -> RunOutcome:
    """Train, or resume, unless the run is finished, and return its outcome.

    Raises:
        SettingsError: The data have no held-out part.
    """
    summary = _finish(directory, recipe, workers, overrides)
    if summary.finish is None or summary.finish.event.held_out_loss is None:
        raise SettingsError(
            f"every run of a comparison must have a held-out loss, but {directory} has none; "
            "take data with a held-out part"
        )
    durations_s = [step.event.duration_s for step in summary.steps]
    curve = [(point.step, point.event.loss) for point in summary.evaluations]
    return RunOutcome(
        loss=summary.finish.event.held_out_loss,
        accuracy=summary.finish.event.metrics.get("accuracy"),
        wire_bytes=summary.wire_bytes or 0,
        step_s=statistics.mean(durations_s),
        curve=curve or [(summary.finish.step, summary.finish.event.held_out_loss)],
    )


def _finish(directory: Path, recipe: str, workers: int, overrides: Overrides) -> RunSummary:
    """Train, or resume, unless the run is finished, and return the summary of its log.

    Raises:
        _WayError: A way that cannot be trained.
        Exit: A signal asked to stop.
    """
    from rich.console import Console

    log = directory / "events.jsonl"
    if not log.exists() or summarise(read_log(log)).finish is None:
        try:
            if not (directory / "run.json").exists():
                prepare_new(recipe, workers, directory, overrides)
        except SettingsError as error:
            raise _WayError(str(error), is_refused=True) from error
        code = launch(directory.absolute(), RunFile.load(directory).num_processes, view=LiveView(Console(quiet=True)))
        if code is ExitCode.PREEMPTED:
            typer.echo(f"stopped in {directory}; the same command goes on from there", err=True)
            raise typer.Exit(code)
        if code is not ExitCode.FINISHED:
            failures = summarise(read_log(log)).failures if log.exists() else []
            reason = failures[-1].event.message if failures else f"no reason in {log}"
            raise _WayError(reason, is_refused=code is ExitCode.REFUSED)
    return summarise(read_log(log))
