"""A broadcast down a tree, chunk after chunk: the common part of a chain, a star and chains of chains."""

import numpy as np

from paceline.programs.base import Integers, Phase, Round, make_round


def tree_broadcast(parents: Integers, num_chunks: int) -> Phase:
    """Return the rounds in which every rank passes each chunk on to its children one round after receiving it.

    It takes ``depth + num_chunks - 1`` rounds; a rank sends the buffer once to each child.

    Args:
        parents: Parent of each rank, -1 for the root, shape ``(num_ranks,)``.
        num_chunks: Chunks of the pipeline.
    """
    depths = np.zeros_like(parents)
    ancestors = parents
    while (ancestors >= 0).any():
        depths += ancestors >= 0
        ancestors = np.where(ancestors >= 0, parents[ancestors], -1)
    children = np.flatnonzero(parents >= 0)

    def make(index: int) -> Round:
        chunks = index + 1 - depths[children]
        is_there = (chunks >= 0) & (chunks < num_chunks)
        return make_round(parents[children], children, chunks, is_there, adds=False)

    return Phase(int(depths.max()) + num_chunks - 1 if len(children) else 0, make)
