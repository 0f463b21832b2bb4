"""The file of a run in its directory: its configuration, and what it was started with."""

import json
import os
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from paceline.checkpoint.durable import sync_directory, write_file
from paceline.errors import SettingsError, storing
from paceline.registry import Settings, explain
from paceline.sync import Rule
from paceline.topology.layout import Layout


class RunFile(Settings):
    """Content of ``run.json`` in a run's directory."""

    recipe: str
    """Origin of the run: a recipe's name or a function's path."""
    num_workers: int
    """Number of workers that the run was started with."""
    launch: str = ""
    """Name of the launcher's job, by which its restarted workers find the run again."""
    run: dict[str, Any]
    """The complete run."""

    @property
    def num_processes(self) -> int:
        """Number of processes: all ranks of workers, and servers that have processes of their own."""
        num_servers = Rule.model_validate(self.run["sync"]).num_server_processes
        return self.num_workers * Layout.model_validate(self.run.get("layout", {})).ranks_of_worker + num_servers

    def save(self, directory: Path) -> None:
        """Write the file, on disk before it takes its place; an older one is kept beside it under a number.

        Raises:
            StorageError: The disk is full or read-only; the directory stays as it was.
        """
        path = directory / "run.json"
        new, old = (directory / f".run.json.{os.getpid()}.{end}" for end in ("new", "old"))
        with storing(path):
            try:
                write_file(new, self.model_dump_json(indent=2).encode() + b"\n")
                if path.exists():
                    write_file(old, path.read_bytes())  # a copy: there is a run.json at every instant
                    old.replace(directory / f"run-{len(self.list_older(directory)) + 1}.json")
                new.replace(path)
                sync_directory(directory)
            finally:
                for part in (new, old):
                    part.unlink(missing_ok=True)

    @staticmethod
    def list_older(directory: Path) -> list[Path]:
        """Return the older files that `save` has kept, the oldest first."""
        return sorted(directory.glob("run-*.json"), key=lambda path: (len(path.name), path.name))

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a run's file.

        Raises:
            SettingsError: The file does not exist, or is no valid run.
        """
        path = directory / "run.json"
        if not path.is_file():
            raise SettingsError(f"a run's directory must hold run.json, but {directory} does not; check the path")
        try:
            return cls.model_validate(json.loads(path.read_text()))
        except ValidationError as error:
            raise SettingsError(f"{path} must be a run's file, but: {explain(error)}") from error
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"{path} must be JSON, but: {error}") from error
