"""`plan.json`: a plan as overrides of a run, with what it predicts, for whom it was made, and why."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from paceline.errors import SettingsError, storing
from paceline.registry import Settings, explain
from paceline.training.forecast import Forecast
from paceline.training.run import Run

_PLACES = ("path", "paths", "url", "held_out_path", "cache")
"""Settings of data that say where it lies."""


class PlannedMachines(Settings):
    """Machines that a plan is for."""

    name: str
    """Name of the cluster, as it was given."""
    num_ranks: int
    """Ranks that the plan uses."""
    num_hosts: int
    """Hosts that these need."""
    words: str
    """The same in words."""


class Plan(Settings):
    """Content of ``plan.json``."""

    version: Literal[1] = 1
    recipe: str | None
    """Recipe that was planned; None for a model that was given by its shape."""
    fingerprint: str
    """Digest of what the plan leaves as it is: model, data, optimizer and global batch of the recipe."""
    overrides: dict[str, Any]
    """Settings of the run, by dotted path."""
    num_workers: int
    """Number of workers."""
    machines: PlannedMachines
    """Machines that it is for."""
    predicted: Forecast
    """Prediction of a step on them."""
    words: str
    """The plan in words."""
    why: dict[str, Any] = Field(default={})
    """Reasons: changes of the machines, neighbours, ties, and what is better than a plainer choice."""

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            StorageError: The disk is full or read-only.
        """
        with storing(path):
            path.write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a plan.

        Raises:
            SettingsError: The file does not exist, or is no plan.
        """
        try:
            return cls.model_validate(json.loads(path.read_text()))
        except OSError as error:
            raise SettingsError(f"--plan must be a file that can be read, but got {path}; check the path") from error
        except ValidationError as error:
            raise SettingsError(f"--plan must be a file of `paceline plan`, but {path}: {explain(error)}") from error
        except ValueError as error:
            raise SettingsError(f"--plan must be JSON, but {path} is not: {error}; make a plan again") from error

    def list_pairs(self) -> list[tuple[str, str]]:
        """Return its overrides as those of a command line."""
        return [(path, to_text(value)) for path, value in self.overrides.items()]

    def check(self, run: Run, recipe: str) -> None:
        """Refuse a run that the plan is not of.

        Args:
            run: The run with the overrides of the plan, and of the command line.
            recipe: Recipe of it.

        Raises:
            SettingsError: The plan is of another recipe or model.
        """
        if self.recipe is None:
            raise SettingsError(
                f"--plan must be of the recipe that is trained, but it is of a model given by --model; run paceline "
                f"plan {recipe}"
            )
        if name_recipe(self.recipe) != name_recipe(recipe):
            raise SettingsError(f"--plan must be of the recipe {recipe}, but it is of {self.recipe}; plan it again")
        if self.fingerprint != fingerprint(run):
            raise SettingsError(
                f"--plan must be of the model that is trained, but model, data, optimizer or global_batch of {recipe} "
                "were others when it was made; plan again with the same settings"
            )


def fingerprint(run: Run) -> str:
    """Return a digest of what a plan leaves as it is, without the places of files, which differ between machines."""
    kept = run.model_dump(mode="json", include={"model", "data", "optimizer", "global_batch", "sync"})
    kept["data"] = {name: value for name, value in kept["data"].items() if name not in _PLACES}
    text = re.sub(r'"[^"]*/([^"/]+\.py:)', r'"\1', json.dumps(kept, sort_keys=True))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def name_recipe(recipe: str) -> str:
    """Return a recipe without the directory of its file."""
    return recipe.rpartition("/")[2]


def to_text(value: Any) -> str:
    """Return a value as it is written on a command line."""
    return value if isinstance(value, str) else json.dumps(value)
