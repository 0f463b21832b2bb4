"""What a reproduction is: settings that measure a published table again, and print both."""

import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.benchmarks.tables import TableRow
from paceline.benchmarks.workers import Workers
from paceline.comm import join
from paceline.errors import SettingsError
from paceline.launch import ExitCode
from paceline.launch.worker import work
from paceline.monitor.reader import Summary, read_log, summarise
from paceline.registry import Family
from paceline.training.run import Run, RunFile


class Reproduction(Family):
    """Settings of a published table that is measured again."""

    family = "reproduction"

    @abstractmethod
    def reproduce(self) -> Sequence[TableRow]:
        """Measure it."""


def train_once(run: Run, recipe: str, workers: Workers) -> Summary:
    """Return how a run of a recipe went, with its workers where they were asked to be; nothing of it is kept.

    Raises:
        SettingsError: It did not finish.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-reproduce-") as folder:
        file = RunFile(recipe=recipe, num_workers=workers.num_workers, run=run.model_dump(mode="json"))
        codes = workers.start(train_here, folder, file.model_dump(mode="json"))
        summary = summarise(read_log(Path(folder) / "events.jsonl"))
    if summary.finish is None or any(code != ExitCode.FINISHED for code in codes.values()):
        why = "; ".join(failure.event.message for failure in summary.failures) or f"exit codes {codes}"
        raise SettingsError(f"every run of a reproduction must finish, but one did not: {why}")
    return summary


def train_here(directory: str, file: dict[str, Any]) -> int:
    """Train a run as one of its workers, and return the exit code. Every worker runs it."""
    return int(work(Path(directory), RunFile.model_validate(file), join(), 0))
