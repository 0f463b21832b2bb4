"""Search for a checkpoint: by the run's directory, a folder of checkpoints or its own path; the newest or another."""

import re
import warnings
from pathlib import Path

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.durable import MARKER_NAME
from paceline.checkpoint.remote import fetch_checkpoint, holds_copies, to_path
from paceline.checkpoint.store import CheckpointStore
from paceline.errors import CheckpointError


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint was skipped because it is damaged."""


def find_checkpoint(place: str | Path, which: str = "newest") -> Checkpoint:
    """Return a checkpoint that is complete; its data is verified when it is read.

    Args:
        place: Directory of a run, folder of your own loop's checkpoints, or directory of one checkpoint; or URL of a
            store that a run has copied its checkpoints to (`checkpoint_url`).
        which: ``newest`` for the newest valid one; ``best`` for the one that the run's `keep_best` kept; the step after
            which it was saved; or its directory's name.

    Raises:
        CheckpointError: There is no such checkpoint; the message lists the existing ones.
    """
    path = to_path(place)
    if path is None or holds_copies(path):
        return Checkpoint.open(fetch_checkpoint(str(place), which))
    place = path
    if holds_checkpoint(place):
        return Checkpoint.open(place)
    store = CheckpointStore(place / "checkpoints" if (place / "checkpoints").is_dir() else place)
    there = store.list_checkpoints()
    if which == "newest":
        if (found := store.find_newest_valid(warn_of_damage)) is not None:
            return found
        state = f"all {len(there)} are damaged" if there else "there is none; check the path"
        raise CheckpointError(f"{place} must hold a checkpoint that is whole, but {state}")
    if which == "best":
        if (best := store.find_best()) is not None:
            return Checkpoint.open(best)
        raise CheckpointError(
            f"the best checkpoint must have been kept, but {place} has none; take the newest, or train with keep_best"
        )
    for path in there:  # the latest attempt at a step comes first
        if which in (path.name, _step_of(path)):
            return Checkpoint.open(path)
    listed = ", ".join(dict.fromkeys(_step_of(path) for path in reversed(there))) or "none"
    raise CheckpointError(
        f"a checkpoint must be newest, best or a step, but got {which!r} for {place}; steps there are: {listed}"
    )


def holds_checkpoint(directory: Path) -> bool:
    """Return whether a directory is a committed checkpoint."""
    return (directory / MARKER_NAME).is_file()


def warn_of_damage(path: Path, reason: str) -> None:
    """Warn that a checkpoint is skipped."""
    warnings.warn(f"{path} is damaged and was skipped: {reason}", DamagedCheckpointWarning, stacklevel=3)


def _step_of(path: Path) -> str:
    """Return the step in the name of a checkpoint's directory, without leading zeros."""
    match = re.match(r"step-0*(\d+)", path.name)
    assert match is not None
    return match[1]
