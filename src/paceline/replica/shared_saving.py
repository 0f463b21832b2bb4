"""Checkpoints of ranks that share a model: each writes its own slices, where all see the directory."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint import AsyncSaver, CheckpointStore
from paceline.comm.group import Group
from paceline.parallel.model_shard import ModelShard
from paceline.replica.gathering import divide, gather

_TIMEOUT_S = 3600.0
"""Time that ranks wait for each other to write; the death of one is noticed at once."""


def open_saver(store: CheckpointStore, shard: ModelShard) -> AsyncSaver | None:
    """Return what saves on this rank; None if rank 0 saves for it. Every rank calls it.

    Rank 0 saves for all where each worker is one rank, or where another rank does not see the directory: hosts need
    not share a file system.

    Args:
        store: Store of the checkpoints.
        shard: This rank's shard of the model.
    """
    if shard.mesh is not None and shard.world.size > 1 and _is_seen_by_all(store.directory, shard.world):
        return AsyncSaver(store, shard.mesh.open_process_group(_TIMEOUT_S))
    return AsyncSaver(store) if shard.world.rank == 0 else None


def start_saving(
    saver: AsyncSaver | None,
    mine: Mapping[str, Tensor],
    document: Mapping[str, Any],
    step: int,
    world: Group,
    *,
    is_best: bool = False,
) -> None:
    """Begin to save what `describe` returned on each rank; every rank calls it.

    Args:
        saver: This rank's saver, of `open_saver`.
        mine: This rank's tensors.
        document: Document; rank 0's is saved.
        step: Step after which it is saved.
        world: All ranks.
        is_best: Whether the checkpoint becomes the best one.
    """
    if saver is not None and saver.is_shared:
        saver.start_blocks(divide(mine, world), document, step, is_best=is_best)
        return
    tensors = gather(mine, world)
    if saver is not None:
        saver.start(tensors, document, step, is_best=is_best)


def _is_seen_by_all(directory: Path, world: Group) -> bool:
    """Whether a file that rank 0 makes is there for every rank, which must be able to write beside it."""
    mark = directory / ".seen"
    if world.rank == 0:
        with contextlib.suppress(OSError):  # the first save tells
            directory.mkdir(parents=True, exist_ok=True)
            mark.touch()
    world.barrier(name="directory of checkpoints")
    answers = world.gather_documents(mark.exists() and os.access(directory, os.W_OK), name="directory of checkpoints")
    if world.rank == 0:
        mark.unlink(missing_ok=True)
    return all(answers)
