"""Identity of a data set's content, in what workers compare and what a checkpoint holds."""

from typing import Any

from paceline.comm.group import Group
from paceline.data.base import IterableSource, Source
from paceline.errors import DataError


def describe_content(source: Source | None) -> str:
    """Return words on the content of a source, for a loader's description; empty where it has no fingerprint."""
    return f" of data {source.fingerprint}" if source is not None and source.fingerprint else ""


def content_state(source: Source | None) -> dict[str, Any]:
    """Return what a checkpoint holds of the content."""
    return {"data": source.fingerprint} if source is not None and source.fingerprint else {}


def check_content(state: dict[str, Any], source: Source | None) -> None:
    """Compare the content with that of a checkpoint, if both have a fingerprint.

    Raises:
        DataError: Contents differ.
    """
    here, saved = content_state(source).get("data"), state.get("data")
    if source is not None and here and saved and not source.recognises(saved):
        raise DataError(
            f"the data must be that of the checkpoint, {saved}, but is {here}: files were added, removed or changed; "
            "restore them (--data.snapshot names what a run wants), or begin a new run"
        )


def agree_on_content(source: Source | IterableSource, world: Group) -> None:
    """Compare the content on all ranks.

    Raises:
        DataError: A rank has other data than rank 0.
    """
    if world.size == 1 or isinstance(source, IterableSource) or not source.fingerprint:
        return
    everybody = world.gather_documents(source.fingerprint, name="fingerprint of the data")
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            raise DataError(
                f"all ranks must have the same data, but rank 0 has {everybody[0]}, and rank {rank} has {theirs}; copy "
                "the files and their index to all hosts anew (paceline data check says which file differs)"
            )
