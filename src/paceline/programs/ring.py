"""The ring: every rank sends to the next one only."""

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from paceline.programs.base import (
    Algorithm,
    Collective,
    Integers,
    Phase,
    Program,
    Round,
    chunk_bounds,
    make_round,
)
from paceline.programs.pipeline import tree_broadcast
from paceline.registry import register


@register("ring")
class Ring(Algorithm):
    """A ring of ranks (Patarasuk and Yuan 2009): all links busy all the time, but n - 1 steps for each half.

    On the wire, of S bytes among n ranks, each rank to the next: all-reduce 2(n-1) rounds and 2(n-1)/n * S,
    reduce-scatter and all-gather half of it. Broadcast is a chain that passes chunk after chunk on: n - 2 + num_chunks
    rounds, S. All-to-all passes all data along: n - 1 rounds, (n-1)/2 * S. With two ranks it is a pairwise exchange.
    """

    collectives: ClassVar = frozenset(Collective)

    def _build(self, collective: Collective, num_ranks: int, root: int) -> Program:
        if collective == Collective.ALL_TO_ALL:
            passing = Phase(num_ranks - 1, lambda index: _pass_along(num_ranks, index))
            return Program.of_phases(collective, self.name, num_ranks, num_ranks**2, [passing])
        num_chunks = self.num_chunks or num_ranks
        ranks = np.arange(num_ranks)
        if collective == Collective.BROADCAST:
            parents = np.where(ranks == root, -1, (ranks - 1) % num_ranks)
            chain = tree_broadcast(parents, num_chunks)
            return Program.of_phases(collective, self.name, num_ranks, num_chunks, [chain], root=root)
        bounds = chunk_bounds(num_chunks, num_ranks)
        phases = {
            Collective.REDUCE_SCATTER: ring_reduce_scatter(ranks[None], bounds[None]),
            Collective.ALL_GATHER: ring_all_gather(ranks[None], bounds[None]),
        }
        if collective == Collective.ALL_REDUCE:
            return Program.of_phases(collective, self.name, num_ranks, num_chunks, list(phases.values()))
        owners = np.repeat(ranks, np.diff(bounds))
        return Program.of_phases(collective, self.name, num_ranks, num_chunks, [phases[collective]], owners=owners)


def ring_reduce_scatter(members: Integers, bounds: Integers) -> Phase:
    """Return the rounds after which the k-th rank of each ring holds the sum of the ring's k-th block.

    Args:
        members: Ranks of each ring in order, shape ``(num_rings, length)``.
        bounds: Chunks at which the blocks of each ring begin, shape ``(num_rings, length + 1)``.
    """
    length = members.shape[1]
    # A block starts one rank after its owner, so that it reaches it after length - 1 hops.
    return _turn(members, bounds, lambda index: (np.arange(length) - 1 - index) % length, adds=True)


def ring_all_gather(members: Integers, bounds: Integers) -> Phase:
    """Return the rounds after which every rank of a ring holds all its blocks; the k-th rank had the k-th."""
    length = members.shape[1]
    return _turn(members, bounds, lambda index: (np.arange(length) - index) % length, adds=False)


def _turn(members: Integers, bounds: Integers, blocks_at: Callable[[int], Integers], *, adds: bool) -> Phase:
    followers = np.roll(members, -1, axis=1)
    sizes = np.diff(bounds, axis=1)

    def make(index: int) -> Round:
        blocks = blocks_at(index)
        return make_round(members, followers, bounds[:, blocks], sizes[:, blocks], adds=adds)

    return Phase(members.shape[1] - 1, make, is_uniform=bool((sizes == sizes[:, :1]).all()))


def _pass_along(num_ranks: int, index: int) -> Round:
    """Each rank forwards the data of the rank `index` before it for the ranks after this one."""
    ranks = np.arange(num_ranks)
    origins = (ranks - index) % num_ranks
    followers = (ranks + 1) % num_ranks
    num_left = num_ranks - 1 - index
    before_end = np.minimum(num_left, num_ranks - followers)  # destinations run to the last rank, then from rank 0
    firsts = np.stack([followers, np.zeros_like(ranks)]) + origins * num_ranks
    counts = np.stack([before_end, num_left - before_end])
    return make_round(ranks, followers, firsts, counts, adds=False)
