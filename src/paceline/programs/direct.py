"""Direct exchange: every rank sends to every other rank, without intermediate hops."""

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
from paceline.registry import register


@register("direct")
class Direct(Algorithm):
    """Direct exchange: in round k every rank sends to the k-th rank after it (Thakur, Rabenseifner, Gropp 2005).

    On the wire, of S bytes among n ranks: reduce-scatter, all-gather and all-to-all n - 1 rounds and (n-1)/n * S a
    rank, all-reduce twice that. As many bytes as the ring, but no third rank forwards anything, and the owner of a
    chunk alone adds it up. Broadcast scatters from the root, then the others exchange: n - 1 rounds, S from the root
    and (n-2)/(n-1) * S from each other rank. It needs a network that joins all pairs. With two ranks it is the ring.
    """

    collectives: ClassVar = frozenset(Collective)

    def _build(self, collective: Collective, num_ranks: int, root: int) -> Program:
        if collective == Collective.ALL_TO_ALL:
            swaps = Phase(num_ranks - 1, lambda index: _swap(num_ranks, index))
            return Program.of_phases(collective, self.name, num_ranks, num_ranks**2, [swaps])
        num_chunks = self.num_chunks or num_ranks
        if collective == Collective.BROADCAST:
            phases = _broadcast(num_ranks, num_chunks, root)
            return Program.of_phases(collective, self.name, num_ranks, num_chunks, phases, root=root)
        ranks = np.arange(num_ranks)
        bounds = chunk_bounds(num_chunks, num_ranks)
        reduce_scatter = Phase(num_ranks - 1, lambda index: _to_owners(ranks, bounds, index))
        all_gather = _all_gather(ranks, bounds)
        if collective == Collective.ALL_REDUCE:
            return Program.of_phases(collective, self.name, num_ranks, num_chunks, [reduce_scatter, all_gather])
        phase = reduce_scatter if collective == Collective.REDUCE_SCATTER else all_gather
        owners = np.repeat(ranks, np.diff(bounds))
        return Program.of_phases(collective, self.name, num_ranks, num_chunks, [phase], owners=owners)


def _to_owners(ranks: Integers, bounds: Integers, index: int) -> Round:
    destinations = np.roll(ranks, -1 - index)
    return make_round(ranks, destinations, bounds[destinations], np.diff(bounds)[destinations], adds=True)


def _all_gather(ranks: Integers, bounds: Integers) -> Phase:
    """Return the rounds in which each of `ranks` sends its block to all of them."""

    def make(index: int) -> Round:
        return make_round(ranks, np.roll(ranks, -1 - index), bounds[:-1], np.diff(bounds), adds=False)

    return Phase(len(ranks) - 1, make)


def _swap(num_ranks: int, index: int) -> Round:
    ranks = np.arange(num_ranks)
    destinations = (ranks + 1 + index) % num_ranks
    return make_round(ranks, destinations, ranks * num_ranks + destinations, 1, adds=False)


def _broadcast(num_ranks: int, num_chunks: int, root: int) -> list[Phase]:
    if num_ranks == 1:
        return []
    others = np.delete(np.arange(num_ranks), root)
    bounds = chunk_bounds(num_chunks, num_ranks - 1)
    scatter = make_round(root, others, bounds[:-1], np.diff(bounds), adds=False)
    return [Phase(1, lambda _: scatter), _all_gather(others, bounds)]
