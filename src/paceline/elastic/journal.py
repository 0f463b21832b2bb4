"""Journal of a coordinator: the facts that it was told, on disk before it acts on them."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self, get_args

from paceline.elastic.facts import Fact
from paceline.elastic.protocol import Coordinator, MembershipSettings
from paceline.errors import storing

JOURNAL = Path("workers", "membership.jsonl")
"""Place of the journal in the directory of a run."""
_KINDS = {kind.__name__: kind for kind in get_args(Fact)}


class Journal:
    """Open journal of a coordinator, one JSON line a fact; the first line holds the coordinator's settings.

    It is a new file in any case: who still has the one before open, and was replaced, writes nothing into this one.

    Args:
        path: File of the journal.
        settings: Settings of a new coordinator; None to go on with the journal that is there.

    Raises:
        StorageError: The file cannot be written.
    """

    def __init__(self, path: Path, settings: MembershipSettings | None) -> None:
        self._path = path
        with storing(path):
            lines = json.dumps(asdict(settings)) + "\n" if settings is not None else _read_whole_lines(path)
            new = path.with_name(f".{path.name}.new")
            self._file = new.open("w", encoding="utf-8")
            self._write(lines)
            new.replace(path)

    def append(self, fact: Fact) -> None:
        """Write a fact, and return once it is on disk.

        Raises:
            StorageError: The journal cannot be written.
        """
        document = {"unix_s": round(time.time(), 3), "fact": type(fact).__name__, **asdict(fact)}
        with storing(self._path):
            self._write(json.dumps(document) + "\n")

    def _write(self, lines: str) -> None:
        self._file.write(lines)
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()


def read_journal(path: Path) -> Coordinator | None:
    """Return the coordinator that wrote a journal, in its last state; None if there is no journal.

    A last line that was cut off is left out: nothing had been done about it.
    """
    if not path.exists():
        return None
    lines = _read_whole_lines(path).splitlines()
    if not lines:
        return None
    coordinator = Coordinator(MembershipSettings(**json.loads(lines[0])))
    coordinator.begin()
    for line in lines[1:]:
        document = json.loads(line)
        del document["unix_s"]
        coordinator.handle(_KINDS[document.pop("fact")](**document))
    return coordinator


def _read_whole_lines(path: Path) -> str:
    lines, end, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return lines + end
