"""Layer 0: errors that Paceline raises at a user.

A message says ``<thing> must be <rule>, but got <value>; <what to do>``. Errors that a new start of the same
run can cure (a peer that died) derive from `CommunicationError`; all others would only happen again.

Settings objects, such as ``Layout(tensor=0)`` or ``DiLoCo(perod=4)``, raise pydantic's `ValidationError` in Python,
which is a `ValueError` but no `PacelineError`.
"""

import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class PacelineError(Exception):
    """Base of the errors that Paceline raises at a user; settings objects raise pydantic's `ValidationError`."""


class SettingsError(PacelineError, ValueError):
    """A setting has a value that cannot work."""


class UnknownNameError(SettingsError):
    """A name is not registered."""


class MissingExtraError(PacelineError, ImportError):
    """A feature needs a package that an extra of Paceline installs."""


class BudgetError(PacelineError):
    """The budget of a run is spent; what was trained is saved."""


class DataError(PacelineError):
    """Training data is missing, empty, damaged or of the wrong type."""


class BadSample(DataError):  # noqa: N818  # what it is, as Python's own StopIteration
    """A sample that cannot be read.

    Args:
        message: Message for a person.
        path: Path of the file that holds it.
        key: Name of the sample in the file.
        reason: Reason, without the place.
    """

    def __init__(self, message: str, *, path: str = "", key: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.path, self.key, self.reason = path, key, reason


class CheckpointError(PacelineError):
    """A checkpoint could not be written, or no complete one was found."""


class StorageError(CheckpointError):
    """A checkpoint, or another file of a run, could not be written: the disk is full or read-only, for instance."""


class CommunicationError(PacelineError):
    """A collective operation failed because a peer died or stopped answering."""


class PeerTimeoutError(CommunicationError):
    """A collective operation did not finish in time; the message says where each rank is."""

    hung_ranks: tuple[int, ...] = ()
    """Ranks that hang by the verdict of the one that waited; empty where it only ran out of time."""


class MismatchError(PacelineError):
    """Ranks ran different operations where all must run the same: a bug, which a new start would only meet again."""


class NonFiniteError(PacelineError):
    """A loss or gradient became NaN or infinite."""


class SpikeError(PacelineError):
    """A loss or a gradient norm is far above those before, and its update is not made."""


class DivergenceError(PacelineError):
    """Replicas that must be equal are not."""


class ProgramError(PacelineError):
    """A collective program is wrong; the message says in which round, between which ranks, at which chunk."""


class GradientError(PacelineError):
    """Gradients were produced in a way that cannot be exchanged correctly."""


def unknown_name(what: str, name: str, known: Iterable[str], hint: str = "") -> UnknownNameError:
    """Return the error for an unknown `name`, listing the known ones, after a `hint` or else the closest."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"{hint}; " if hint else f"did you mean {close[0]!r}? " if close else ""
    listed = ", ".join(names) or "none"
    return UnknownNameError(f"{what} must be a known name, but got {name!r}; {hint}known: {listed}")


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """Return the error for a missing optional `package`, with the pip line that installs it."""
    return MissingExtraError(f"{purpose} needs the package {package}; pip install 'paceline[{extra}]'")


@contextmanager
def storing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, an error of the file system is a `StorageError`, which says that `path` could not be written."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{os.fspath(path)} could not be written: {error.strerror or error}; {advise_on_storage(error)}"
        ) from error


def advise_on_storage(error: OSError) -> str:
    """Return what to do about an error of the file system."""
    if error.errno == errno.ENOSPC:
        return "free space there, or choose another directory"
    if error.errno == errno.EDQUOT:
        return "raise the quota, or choose another directory"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the directory writable, or choose another"
    return "check the disk, or choose another directory"
