"""`paceline plan --measure N`: candidates trained on this machine for a few seconds each, as `paceline train` would."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from paceline.cli.other_command import end_process
from paceline.cli.overrides import apply_overrides
from paceline.errors import SettingsError
from paceline.launch.signals import cleaning_up_when_asked
from paceline.monitor.events import StepFinished
from paceline.monitor.reader import read_log
from paceline.planner.measured import SKIPPED, Measure
from paceline.planner.plan_file import fingerprint, to_text
from paceline.planner.planning import Planned, to_plan

if TYPE_CHECKING:
    from paceline.training.run import Run

_SECONDS = 4.0
"""Time that a run shall take, without its start."""
_LEAST_STEPS = 6
"""Steps that are measured at least; of a rule with a period, periods."""
_MOST_STEPS = 500
_LIMIT_S = 600.0
"""Time after which a run is ended, however many steps it has done."""
_POLL_S = 0.1
_FAILED = 1
_NOT_FOR_TRIALS = {
    "callbacks": (),
    "checkpoint_url": None,
    "stop_after": None,
    "evaluate_interval": 0,
    "checkpoint_interval": 0,
    "noise_scale_interval": 0,
}
"""Settings of a run that is only measured: it tells nobody, evaluates nothing and keeps nothing."""


def make_measure(recipe: str, overrides: Sequence[tuple[str, str]], run: "Run") -> Measure:
    """Return the function that trains a recipe by a plan until enough steps are done, and returns their times.

    Args:
        recipe: The recipe.
        overrides: Settings of the command line.
        run: The run with these.
    """

    def measure(planned: Planned) -> list[float]:
        pairs = [(path, to_text(value)) for path, value in planned.candidate.list_overrides().items()]
        plan = to_plan(planned, recipe, fingerprint(apply_overrides(run, pairs)))
        with TemporaryDirectory(prefix="paceline-plan-") as folder:
            plan.save(Path(folder) / "plan.json")
            command = [sys.executable, "-m", "paceline", "train", recipe, "--plan", str(Path(folder) / "plan.json")]
            command += ["--out", str(Path(folder) / "run"), *list_options(run, overrides)]
            return train(command, Path(folder), count_steps(planned))

    return measure


def list_options(run: "Run", overrides: Sequence[tuple[str, str]]) -> list[str]:
    """Return the options of a run that is only measured: those of the command line, and what it must not do."""
    given = {name: value for name, value in overrides if name not in _NOT_FOR_TRIALS}
    kept = {
        name: "none" if value is None else to_text(value)
        for name, value in _NOT_FOR_TRIALS.items()
        if getattr(run, name) != value
    }
    return [word for name, value in (given | kept).items() for word in (f"--{name}", value)]


def count_steps(planned: Planned) -> int:
    """Return how many steps of a plan are trained to measure it."""
    way = planned.candidate.way
    period = 1 if way is None else way.period
    wanted = min(_MOST_STEPS, int(_SECONDS / planned.answer["step_s"]))
    return max(wanted, _LEAST_STEPS if period == 1 else 3 * period) + max(SKIPPED, period if period > 1 else 0)


def train(command: list[str], folder: Path, num_steps: int) -> list[float]:
    """Run a training until it has done so many steps, and return their times on rank 0.

    Raises:
        SettingsError: The training failed.
    """
    log, began_s = folder / "run" / "events.jsonl", time.monotonic()
    with (folder / "output").open("w") as output, cleaning_up_when_asked():
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() - began_s < _LIMIT_S:
                if len(_read_steps(log)) >= num_steps:
                    break
                time.sleep(_POLL_S)
        finally:
            end_process(process)
    steps_s = _read_steps(log)
    if process.returncode in (_FAILED, 2) and len(steps_s) < num_steps:
        lines = (folder / "output").read_text(errors="replace").strip().splitlines()
        raise SettingsError(f"a run of it must succeed, but exits with {process.returncode}: {' '.join(lines[-3:])}")
    return steps_s


def _read_steps(log: Path) -> list[float]:
    if not log.is_file():
        return []
    records = read_log(log)
    return [one.event.duration_s for one in records if one.rank == 0 and isinstance(one.event, StepFinished)]
