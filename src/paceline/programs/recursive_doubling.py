"""Recursive doubling: the all-reduce of the fewest rounds, for small messages."""

from typing import ClassVar

import numpy as np

from paceline.programs.base import Algorithm, Collective, Phase, Program, Round, in_order, make_round
from paceline.registry import register


@register("recursive_doubling")
class RecursiveDoubling(Algorithm):
    """Each rank swaps its whole sum with the rank at distance 1, 2, 4, ..., and adds what it gets.

    The all-reduce of Thakur, Rabenseifner and Gropp (2005) for small messages: log2 n rounds, half of those of
    `halving_doubling`, and log2(n) * S bytes a rank instead of 2 (n-1)/n * S: take it where the latency of a message
    counts for more than its bytes, which is below some tens of kilobytes. Where n is no power of two, each rank above
    the largest one below n gives its data to the rank that many below it first, and gets the result in the end: two
    rounds more.
    """

    collectives: ClassVar = frozenset({Collective.ALL_REDUCE})

    def _build(self, collective: Collective, num_ranks: int, root: int) -> Program:
        num_chunks = self.num_chunks or 1
        cube = 1 << (num_ranks.bit_length() - 1)
        extra = np.arange(cube, num_ranks)

        def swap(index: int) -> Round:
            ranks = np.arange(cube)
            return make_round(ranks, ranks ^ (1 << index), 0, num_chunks, adds=True)

        fold = int(len(extra) > 0)
        phases = [
            Phase(fold, lambda _: make_round(extra, extra - cube, 0, num_chunks, adds=True)),
            Phase(cube.bit_length() - 1, swap),
            Phase(fold, lambda _: make_round(extra - cube, extra, 0, num_chunks, adds=False)),
        ]
        return Program.of_phases(collective, self.name, num_ranks, num_chunks, [in_order(phases)])
