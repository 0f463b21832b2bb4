"""All data through one rank: the reference that other programs are compared with."""

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


@register("naive")
class Naive(Algorithm):
    """A star: the root collects from every rank and sends to every rank.

    On the wire, of S bytes among n ranks: all-reduce n - 1 rounds in which the root receives, from one rank after
    another since a sum has an order, and 1 in which it sends: (n-1) * S each way through its link. Broadcast is the
    last round alone. Reduce-scatter and all-gather are similar, but send no chunk to a rank that has it or does not
    need it. With two ranks the all-reduce is a send and a reply.
    """

    collectives: ClassVar = frozenset(Collective) - {Collective.ALL_TO_ALL}

    def _build(self, collective: Collective, num_ranks: int, root: int) -> Program:
        num_chunks = self.num_chunks or (
            1 if collective in (Collective.ALL_REDUCE, Collective.BROADCAST) else num_ranks
        )
        others = np.delete(np.arange(num_ranks), root)
        bounds = chunk_bounds(num_chunks, num_ranks)
        collect = Phase(num_ranks - 1, lambda index: make_round(others[index], root, 0, num_chunks, adds=True))
        phases = {
            Collective.ALL_REDUCE: [collect, _once(make_round(root, others, 0, num_chunks, adds=False))],
            Collective.BROADCAST: [_once(make_round(root, others, 0, num_chunks, adds=False))],
            Collective.REDUCE_SCATTER: [collect, _once(_blocks(root, others, others, bounds))],
            Collective.ALL_GATHER: [
                _once(_blocks(others, root, others, bounds)),
                _once(_the_rest(root, others, bounds)),
            ],
        }
        has_owners = collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        return Program.of_phases(
            collective,
            self.name,
            num_ranks,
            num_chunks,
            phases[collective] if num_ranks > 1 else [],
            root=root,
            owners=np.repeat(np.arange(num_ranks), np.diff(bounds)) if has_owners else None,
        )


def _once(round_: Round) -> Phase:
    return Phase(1, lambda _: round_)


def _blocks(sources: Integers | int, destinations: Integers | int, blocks: Integers, bounds: Integers) -> Round:
    return make_round(sources, destinations, bounds[blocks], np.diff(bounds)[blocks], adds=False)


def _the_rest(root: int, others: Integers, bounds: Integers) -> Round:
    """The root sends each rank the chunks before its own block and those after it."""
    firsts = np.stack([np.zeros_like(others), bounds[others + 1]])
    counts = np.stack([bounds[others], bounds[-1] - bounds[others + 1]])
    return make_round(root, others, firsts, counts, adds=False)
