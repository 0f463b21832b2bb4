"""Shards that appear while training goes on: looked for, and taken once all ranks see them."""

from typing import Any

from paceline.comm.group import Group
from paceline.data.base import IterableSource, Source
from paceline.errors import DataError


def agree_on_shards(source: Source | IterableSource, world: Group, *, looks: bool) -> None:
    """Let a source that grows have the shards that all ranks see; each rank calls it.

    A shard that some rank does not see yet, as in a file system that is slow to show it, is left to the next time.

    Args:
        source: Source of samples; nothing is done if it does not grow.
        world: All ranks.
        looks: Whether to look for new shards; else those count that each rank knows already.

    Raises:
        DataError: A shard that was there is missing or has changed, on any rank.
    """
    if isinstance(source, IterableSource) or not source.grows:
        return
    shards: list[Any] = []
    refused = ""
    try:
        shards = source.list_shards(looks=looks)
    except DataError as error:  # all ranks must learn of it, rather than wait for this one
        refused = str(error)
    everybody = world.gather_documents({"shards": shards, "refused": refused}, name="shards of the data")
    if words := next((theirs["refused"] for theirs in everybody if theirs["refused"]), ""):
        raise DataError(words)
    agreed = 0
    for same in zip(*(theirs["shards"] for theirs in everybody), strict=False):
        if any(shard != same[0] for shard in same):
            break
        agreed += 1
    if not agreed:
        raise DataError("all ranks must see the same first shard of the data, but do not; copy the data to all hosts")
    source.take_shards(agreed)
