"""What a reproduction is: settings that measure a published table again, and print both."""

import os
import random
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from paceline.benchmarks.tables import TableRow
from paceline.benchmarks.workers import Workers
from paceline.comm import join
from paceline.errors import SettingsError
from paceline.launch import ExitCode
from paceline.launch.worker import work
from paceline.monitor.reader import RunSummary, read_log, summarise
from paceline.registry import Family
from paceline.training.run import Run
from paceline.training.run_file import RunFile


class Reproduction(Family):
    """Settings of a published table that is measured again."""

    family = "reproduction"

    @abstractmethod
    def reproduce(self) -> Sequence[TableRow]:
        """Measure it."""


@dataclass(frozen=True)
class Straggling:
    """When a worker straggles: by a script, the same for every run with the same seed."""

    chance: float
    """Probability of a sleep in each forward pass of training."""
    seconds: float
    """Duration of the sleep."""


def train_once(run: Run, recipe: str, workers: Workers, straggling: Straggling | None = None) -> RunSummary:
    """Return how a run of a recipe went, with its workers where they were asked to be; nothing of it is kept.

    Args:
        run: Run to train.
        recipe: Name of the recipe.
        workers: Workers of the run.
        straggling: Random sleeps of each worker.

    Raises:
        SettingsError: The run did not finish.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-reproduce-") as folder:
        file = RunFile(recipe=recipe, num_workers=workers.num_workers, run=run.model_dump(mode="json"))
        codes = workers.start(train_here, folder, file.model_dump(mode="json"), straggling and asdict(straggling))
        summary = summarise(read_log(Path(folder) / "events.jsonl"))
    if summary.finish is None or any(code != ExitCode.FINISHED for code in codes.values()):
        why = "; ".join(failure.event.message for failure in summary.failures) or f"exit codes {codes}"
        raise SettingsError(f"every run of a reproduction must finish, but one did not: {why}")
    return summary


def train_here(directory: str, file: dict[str, Any], straggling: dict[str, float] | None) -> int:
    """Train a run as one of its workers, and return the exit code. Every worker runs it."""
    run_file = RunFile.model_validate(file)
    with _straggle(run_file.run.get("seed", 0), Straggling(**straggling)) if straggling else nullcontext():
        return int(work(Path(directory), run_file, join(), 0))


@contextmanager
def _straggle(seed: int, straggling: Straggling) -> Iterator[None]:
    script = random.Random(f"{seed} {os.environ['RANK']}")
    depth = [0]

    def begin(module: nn.Module, inputs: Any) -> None:
        depth[0] += 1
        is_whole_model = depth[0] == 1
        if is_whole_model and module.training and script.random() < straggling.chance:
            time.sleep(straggling.seconds)

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        depth[0] -= 1

    hooks = nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(begin),
        hooks.register_module_forward_hook(end, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
