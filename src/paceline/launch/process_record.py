"""Processes of this machine, written down for others, which find them again and take no other for them."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from paceline.checkpoint.durable import identify
from paceline.comm.stacks import find_host_of_processes, started_at

_NUM_BYTES = 512
"""Length of a file, so that each later record fits where the first one is: a full disk has no place for a new file."""


@dataclass(frozen=True)
class ProcessRecord:
    """One process, or one launcher or worker that it was.

    Args:
        pid: Number of the process.
        started: Time at which it started, in ticks since boot, which tells it from others of the same number.
        host: Key of the machine that it runs on, of this boot.
        number: Number of the launcher, or of the one that asked for the worker: later ones of a run have higher ones.
        is_abandoned: Whether the worker saves and ends, since no launcher came back in time.
        code: Exit code of the process, which it writes down just before its end.
    """

    pid: int
    started: int
    host: str
    number: int
    is_abandoned: bool = False
    code: int | None = None

    @classmethod
    def of_this_process(cls, number: int) -> Self:
        """Return the record of the process that calls."""
        return cls(os.getpid(), started_at(os.getpid()), find_host_of_processes(), number)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Return the record in a file; None if none can be read, or if the folder is a copy of another one."""
        try:
            said = json.loads(path.read_text())
            return cls(**said) if said.pop("folder") == identify(path.parent) else None
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None

    def save(self, path: Path) -> None:
        """Write a file in place of any that is there; on a full disk, into one that this process has written before.

        Raises:
            OSError: The file cannot be written.
        """
        document = asdict(self) | {"folder": identify(path.parent)}
        said = json.dumps(document).ljust(_NUM_BYTES).encode()
        new = path.with_name(f".{path.name}.{self.pid}")
        try:
            new.write_bytes(said)
            new.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            before = ProcessRecord.load(path)
            if before is None or (before.pid, before.started, before.number) != (self.pid, self.started, self.number):
                raise
            with path.open("r+b", buffering=0) as file:
                file.write(said)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs on this machine."""
        return self.started > 0 and self.host == find_host_of_processes() and started_at(self.pid) == self.started
