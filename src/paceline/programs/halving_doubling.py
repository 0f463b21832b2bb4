"""Recursive halving and doubling: few rounds, each with a more distant partner."""

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


@register("halving_doubling")
class HalvingDoubling(Algorithm):
    """Recursive halving, then recursive doubling, for any number of ranks.

    At powers of two the hypercube of Thakur, Rabenseifner and Gropp (2005), nearest first: ranks at distance 1, 2, ...,
    n/2 swap and add halves of the data that they still hold, and go back in the opposite order. So most bytes stay
    between neighbours, and the fewest cross the top of a tree of switches. The rank that ends with a part of the data
    is the part's number with its bits reversed. For other numbers the circulant graph of Bruck et al. (1997) for the
    gathering half, and the same run backwards for the reducing half (Träff 2024): a rank sends to one rank and receives
    from another, the farthest first, and no rank is idle, as some are where ranks are folded to a power of two.

    On the wire, of S bytes among n ranks, any n: reduce-scatter and all-gather ceil(log2 n) rounds and (n-1)/n * S a
    rank, which is the least possible of both; all-reduce twice that, the least possible bytes. All-to-all (Bruck)
    ceil(log2 n) rounds and about log2(n)/2 * S. Broadcast is a binomial tree: ceil(log2 n) rounds, S to each rank, but
    ceil(log2 n) * S from the root. With two ranks it is the ring.
    """

    collectives: ClassVar = frozenset(Collective)

    def _build(self, collective: Collective, num_ranks: int, root: int) -> Program:
        distances = [1 << exponent for exponent in range((num_ranks - 1).bit_length())]
        if collective == Collective.ALL_TO_ALL:
            hops = Phase(len(distances), lambda index: _hop(num_ranks, distances[index]))
            return Program.of_phases(collective, self.name, num_ranks, num_ranks**2, [hops])
        if collective == Collective.BROADCAST:
            num_chunks = self.num_chunks or 1
            tree = Phase(len(distances), lambda index: _grow(num_ranks, num_chunks, root, distances[index]))
            return Program.of_phases(collective, self.name, num_ranks, num_chunks, [tree], root=root)
        num_chunks = self.num_chunks or num_ranks
        bounds = chunk_bounds(num_chunks, num_ranks)
        is_cube = num_ranks == 1 << len(distances)
        exchange = _swap if is_cube else _circulate
        halving = Phase(len(distances), lambda index: exchange(num_ranks, bounds, distances[-1 - index], adds=True))
        doubling = Phase(len(distances), lambda index: exchange(num_ranks, bounds, distances[index], adds=False))
        phases = {
            Collective.ALL_REDUCE: [halving, doubling],
            Collective.REDUCE_SCATTER: [halving],
            Collective.ALL_GATHER: [doubling],
        }
        ranks = _reverse_bits(num_ranks) if is_cube else np.arange(num_ranks)
        owners = None if collective == Collective.ALL_REDUCE else np.repeat(ranks, np.diff(bounds))
        return Program.of_phases(collective, self.name, num_ranks, num_chunks, phases[collective], owners=owners)


def _swap(num_ranks: int, bounds: Integers, distance: int, *, adds: bool) -> Round:
    """Swap blocks between corners of a cube: to be added, those of the other's half; else those of this rank's half.

    Corners are numbered as blocks are: those whose blocks lie far apart are neighbours among the ranks.
    """
    corners, ranks = np.arange(num_ranks), _reverse_bits(num_ranks)
    partners = corners ^ distance
    begins = (partners if adds else corners) // distance * distance
    return make_round(ranks, ranks[partners], bounds[begins], bounds[begins + distance] - bounds[begins], adds=adds)


def _reverse_bits(num_ranks: int) -> Integers:
    """Return 0, 1, ..., num_ranks - 1, a power of two, each with its bits in reverse."""
    numbers = np.zeros(1, np.int64)
    while len(numbers) < num_ranks:
        numbers = np.concatenate([2 * numbers, 2 * numbers + 1])
    return numbers


def _circulate(num_ranks: int, bounds: Integers, distance: int, *, adds: bool) -> Round:
    """Send `distance` blocks (fewer in the outermost round) around the ring: forwards to be added, else backwards.

    Doubling: every rank holds the `distance` blocks from its own on, and receives those that follow. Halving is the
    same in reverse: the partial sums of these blocks go to where the blocks would have come from.
    """
    ranks = np.arange(num_ranks)
    holders = (ranks + distance) % num_ranks
    num_blocks = min(distance, num_ranks - distance)
    before_end = np.minimum(num_blocks, num_ranks - holders)  # blocks run to the last one, then on from block 0
    begins = np.stack([holders, np.zeros_like(ranks)])
    ends = begins + np.stack([before_end, num_blocks - before_end])
    sources, destinations = (ranks, holders) if adds else (holders, ranks)
    return make_round(sources, destinations, bounds[begins], bounds[ends] - bounds[begins], adds=adds)


def _hop(num_ranks: int, distance: int) -> Round:
    """Send one hop on each block that has an odd number of `distance`s left to go."""
    origins, offsets = np.indices((num_ranks, num_ranks)).reshape(2, -1)
    origins, offsets = origins[offsets & distance > 0], offsets[offsets & distance > 0]
    places = (origins + offsets % distance) % num_ranks
    chunks = origins * num_ranks + (origins + offsets) % num_ranks
    return make_round(places, (places + distance) % num_ranks, chunks, 1, adds=False)


def _grow(num_ranks: int, num_chunks: int, root: int, distance: int) -> Round:
    """The `distance` ranks from the root on have the buffer, and send it to the same number of ranks after them."""
    sources = np.arange(min(distance, num_ranks - distance))
    return make_round((sources + root) % num_ranks, (sources + distance + root) % num_ranks, 0, num_chunks, adds=False)
