"""Requests of people to a run that trains: files in its directory, which its launcher answers."""

import contextlib
import fcntl
import json
import os
import stat
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard

from paceline.elastic.facts import Fact, LeaveAsked, Scaled
from paceline.elastic.journal import JOURNAL, read_journal
from paceline.elastic.protocol import Coordinator
from paceline.errors import SettingsError, storing

_POLL_S = 0.05


class RequestBox:
    """Requests of people, on the side of the launcher.

    Args:
        directory: Directory of the run.
        most_workers: Largest number of workers that the run can have.
        why_most: Reason for that number.
        notice_s: Time for a worker to leave if the request names none; None for any time.
        keeps_older: Whether to read requests to the launcher before, too.
    """

    def __init__(
        self,
        directory: Path,
        most_workers: int,
        why_most: str,
        *,
        notice_s: float | None = None,
        keeps_older: bool = False,
    ) -> None:
        self._notice_s = notice_s
        self._folder = directory / "requests"
        self._most_workers, self._why_most = most_workers, why_most
        with storing(self._folder):
            self._folder.mkdir(exist_ok=True)
        self._untouchable: set[str] = set()
        """Names of what was refused, but could not be removed."""
        for file in [] if keeps_older else self._folder.iterdir():  # of a launcher that was killed
            with contextlib.suppress(OSError):  # what stays is refused in `read`
                file.unlink()

    def read(self, coordinator: Coordinator) -> list[Fact]:
        """Return what people have asked for since the last call, and tell them whether it will be done.

        Whatever lies there, training goes on: what is no request is refused with a sentence.
        """
        facts: list[Fact] = []
        try:
            names = os.listdir(self._folder)
        except OSError:  # somebody removed the folder: `ask` says that nobody reads it
            return []
        self._untouchable &= set(names)
        for name in names:
            if name.endswith((".leave", ".request")) and name not in self._untouchable:
                facts += self._take(self._folder / name, coordinator)
        return facts

    def _take(self, path: Path, coordinator: Coordinator) -> list[Fact]:
        """Return what a file asks for, and remove it.

        A program's ``.request`` is answered in any case. A person may write ``NAME.leave`` by hand, with a number of
        seconds in it or nothing; who asks in vain finds ``NAME.leave.refused``.
        """
        try:
            asked = _read_leave(path) if path.suffix == ".leave" else _read_request(path)
            facts, refusal = [self._find_fact(asked, coordinator)], ""
        except FileNotFoundError:  # taken back
            return []
        except SettingsError as error:
            facts, refusal = [], str(error)
        try:
            path.unlink()
        except FileNotFoundError:  # taken back in this moment
            return []
        except OSError:
            self._untouchable.add(path.name)
        with contextlib.suppress(OSError):  # a full disk: who waits for an answer says that none came
            if path.suffix == ".request":
                _write(path.with_suffix(".answer"), {"done": not refusal, "words": refusal})
            elif refusal:
                path.with_suffix(".leave.refused").write_text(f"{refusal}\n", errors="backslashreplace")
        return facts

    def _find_fact(self, asked: dict[str, object], coordinator: Coordinator) -> Fact:
        if coordinator.view is None:
            raise SettingsError("workers must have begun to train before they change, but they are starting; try again")
        if why := coordinator.obstacle or coordinator.fixed:
            raise SettingsError(
                f"workers of this run must stay the same, but got a request to change them: {why}; "
                "stop the run, and resume it with --workers"
            )
        leaver, target = asked.get("leave"), asked.get("target")
        if leaver is not None:
            if leaver not in coordinator.members:
                known = ", ".join(coordinator.members)
                raise SettingsError(
                    f"the worker that leaves must be one of {known}, but got {leaver}; name one of them"
                )
            within_s = asked.get("within_s")
            if within_s is None:
                return LeaveAsked(str(leaver), self._notice_s)
            if not _is_number(within_s) or not 0 < within_s <= sys.float_info.max:
                raise SettingsError(
                    f"the time to leave must be more than 0 seconds, but got {within_s!r:.100}; give a finite time"
                )
            return LeaveAsked(str(leaver), float(within_s))
        if not isinstance(target, int) or isinstance(target, bool) or not 1 <= target <= self._most_workers:
            raise SettingsError(
                f"the number of workers must be from 1 to {self._most_workers}, {self._why_most}, but got "
                f"{target!r:.100}; choose another"
            )
        return Scaled(target)


def _read_request(path: Path) -> dict[str, object]:
    """Return the content of a ``.request``; raise `SettingsError` if it is none."""
    try:
        asked = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"a request must be JSON, but {path} is not: {error}; use paceline scale") from error
    if not isinstance(asked, dict):
        raise SettingsError(f"a request must be an object of JSON, but {path} holds {asked!r:.100}; use paceline scale")
    return asked


def _read_leave(path: Path) -> dict[str, object]:
    """Return what a ``NAME.leave`` asks for; raise `SettingsError` if it holds anything but a number."""
    said = _read_text(path).strip()
    try:
        within_s = float(said) if said else None
    except ValueError as error:
        raise SettingsError(
            f"{path} must hold the seconds in which the worker leaves, or nothing, but holds {said!r:.100}; "
            "write a number"
        ) from error
    return {"leave": path.name.removesuffix(".leave"), "within_s": within_s}


def _read_text(path: Path) -> str:
    """Return what a request says; raise `SettingsError` if it is no file that can be read, so that nobody waits."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SettingsError(f"a request must be a file, but {path} is something else; remove it")
        return path.read_text(errors="replace")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SettingsError(f"{path} must be readable by the launcher, but is not: {error}; remove it") from error


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def ask(directory: Path, request: dict[str, object], *, timeout_s: float = 10.0) -> None:
    """Ask the launcher of the run in `directory` for something, and return once it has agreed.

    Raises:
        SettingsError: The run does not train now, or the launcher has refused.
    """
    _check_training(directory)
    path = directory / "requests" / f"{uuid.uuid4().hex}.request"
    with storing(path):
        _write(path, request)
    answer = path.with_suffix(".answer")
    if not _wait_until(answer.exists, timeout_s):
        path.unlink(missing_ok=True)
        raise SettingsError(f"the launcher of {directory} must answer within {timeout_s:g} s, but did not; try again")
    said = json.loads(answer.read_text())
    answer.unlink()
    if not said["done"]:
        raise SettingsError(said["words"])


def describe_workers(directory: Path) -> str:
    """Return which workers of a run train now, in words.

    Raises:
        SettingsError: The run does not train now.
    """
    _check_training(directory)
    coordinator = read_journal(directory / JOURNAL)
    assert coordinator is not None, "a launcher that reads requests has a journal"
    if coordinator.view is None:
        return f"{len(coordinator.workers)} workers are starting"
    idle = [name for name in coordinator.workers if name not in coordinator.members]
    said = f"epoch {coordinator.epoch}: {', '.join(coordinator.members)}; wanted: {coordinator.target}"
    return f"{said}; not in it: {', '.join(idle)}" if idle else said


def _check_training(directory: Path) -> None:
    if not _is_training(directory):
        raise SettingsError(
            f"{directory} must be a run that trains now, started by paceline train on this machine, but no launcher "
            "runs there; resume it with paceline train --resume, and --workers for another number of workers"
        )


def _is_training(directory: Path) -> bool:
    """Return whether a launcher holds the run's lock and reads requests."""
    try:
        descriptor = os.open(directory / ".lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return (directory / "requests").is_dir()
    finally:
        os.close(descriptor)
    return False


def _write(path: Path, document: dict[str, object]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document))
    part.rename(path)


def _wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
