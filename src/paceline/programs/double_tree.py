"""Two binary trees at once, each rank inner in one and a leaf in the other."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.programs.base import Algorithm, Collective, Integers, Phase, Program, Round, make_round
from paceline.registry import register

_PIPELINE_LENGTH = 32
"""Default number of chunks: at 64 ranks the pipeline is then full for more than half of its rounds."""


@register("double_tree")
class DoubleTree(Algorithm):
    """Two in-order binary trees, each for half of the buffer, pipelined in chunks (Sanders, Speck and Träff 2009).

    The second tree is the first one mirrored (even number of ranks) or shifted by one (odd), so that a rank with
    children in one has none in the other. Edges have two colours, used in turn: in each round a rank serves one of its
    (at most two) children, and one of its parents in the two trees. So in a round it sends at most one message up and
    one down, and receives as many, and never two for one chunk. The paper reduces and then broadcasts; here an
    all-reduce does both at once, and its trees hold all ranks.

    On the wire, of S bytes among n ranks: all-reduce 2 * S a rank at most, 2(n-1)/n * S on average, broadcast S at
    most; a chunk passes at most 2 log2(n) edges up and down. Since a node serves its two children one after the other,
    that is at most 4 ceil(log2 n) + num_chunks rounds for an all-reduce, 2 ceil(log2 n) + num_chunks for a broadcast.
    `num_chunks` counts the chunks of both trees: more of them suit large buffers, and one uses one tree only. With two
    ranks each is the root of one tree.
    """

    collectives: ClassVar = frozenset({Collective.ALL_REDUCE, Collective.BROADCAST})

    def _build(self, collective: Collective, num_ranks: int, root: int) -> Program:
        num_chunks = self.num_chunks or _PIPELINE_LENGTH
        uses = _broadcast(num_ranks, root) if collective == Collective.BROADCAST else _all_reduce(num_ranks)
        return Program.of_phases(collective, self.name, num_ranks, num_chunks, [_pipeline(uses, num_chunks)], root=root)


@dataclass(frozen=True)
class _Edges:
    """Edges of both trees, by child: arrays of one length."""

    children: Integers
    parents: Integers
    trees: Integers
    heights: Integers
    """Height of the child, as a power of two: 1 for leaves."""


def _trees(ranks: Integers, above: int) -> _Edges:
    """Return both trees over `ranks`, hung on rank `above` unless that is -1."""
    size = len(ranks)
    roles = np.arange(1, size + 1)  # in order: odd ones are leaves, the largest power of two is the root
    heights = roles & -roles
    inner = (roles ^ heights) | (heights << 1)
    parents = np.where(inner <= size, inner, roles ^ heights)  # 0 for the root
    players = [ranks, ranks[::-1] if size % 2 == 0 else np.roll(ranks, 1)]
    by_role = np.stack([np.append(above, player) for player in players])
    has_parent = by_role[:, parents].ravel() >= 0
    return _Edges(
        by_role[:, roles].ravel()[has_parent],
        by_role[:, parents].ravel()[has_parent],
        np.repeat([0, 1], size)[has_parent],
        np.tile(heights, 2)[has_parent],
    )


def _colours(edges: _Edges) -> Integers:
    """Colour the edges 0 and 1, so that the edges to a rank's children differ, and those to its parents.

    No rank has more than two edges of a kind, so edges that must differ form paths and even cycles.
    """
    mates = np.stack([_mates(edges.children), _mates(edges.parents)]).T.tolist()
    colours = [-1] * len(mates)
    for first in range(len(mates)):
        waiting = [(first, 0)]
        while waiting:
            edge, colour = waiting.pop()
            if edge >= 0 and colours[edge] < 0:
                colours[edge] = colour
                waiting += [(mate, 1 - colour) for mate in mates[edge]]
    return np.array(colours, np.int64)


def _mates(ranks: Integers) -> Integers:
    """Return the index of the other edge with the same rank, or -1."""
    order = np.argsort(ranks, kind="stable")
    (pairs,) = np.nonzero(ranks[order][1:] == ranks[order][:-1])
    mates = np.full_like(ranks, -1)
    mates[order[pairs]], mates[order[pairs + 1]] = order[pairs + 1], order[pairs]
    return mates


def _upwards(edges: _Edges, colours: Integers, num_ranks: int) -> tuple[Integers, Integers]:
    """Return the round in which each edge carries its first sum up, and that in which each tree's root has it."""
    ready = np.zeros((2, num_ranks), np.int64)
    moments = np.zeros_like(colours)
    for edge in np.argsort(edges.heights, kind="stable"):
        child, parent = ready[edges.trees[edge]][[edges.children[edge], edges.parents[edge]]]
        moments[edge] = child + (colours[edge] - child) % 2
        ready[edges.trees[edge], edges.parents[edge]] = max(parent, moments[edge] + 1)
    return moments, ready.max(axis=1)


def _downwards(edges: _Edges, colours: Integers, tops: Integers, num_ranks: int) -> Integers:
    """Return the round in which each edge carries its first chunk down, if the roots have it in rounds `tops`."""
    ready = np.tile(tops[:, None], num_ranks)
    moments = np.zeros_like(colours)
    for edge in np.argsort(-edges.heights, kind="stable"):
        parent = ready[edges.trees[edge], edges.parents[edge]]
        moments[edge] = parent + (colours[edge] - parent) % 2
        ready[edges.trees[edge], edges.children[edge]] = moments[edge] + 1
    return moments


@dataclass(frozen=True)
class _Uses:
    """Messages that repeat in every second round, with the next chunk of their tree."""

    sources: Integers
    destinations: Integers
    trees: Integers
    moments: Integers
    adds: NDArray[np.bool_]


def _broadcast(num_ranks: int, root: int) -> _Uses:
    edges = _trees(np.roll(np.arange(num_ranks), -root)[1:], root)
    moments = _downwards(edges, _colours(edges), np.zeros(2, np.int64), num_ranks)
    return _Uses(edges.parents, edges.children, edges.trees, moments, np.zeros_like(moments, np.bool_))


def _all_reduce(num_ranks: int) -> _Uses:
    edges = _trees(np.arange(num_ranks), -1)
    colours = _colours(edges)
    up, tops = _upwards(edges, colours, num_ranks)
    down = _downwards(edges, colours, tops, num_ranks)
    return _Uses(
        np.concatenate([edges.children, edges.parents]),
        np.concatenate([edges.parents, edges.children]),
        np.tile(edges.trees, 2),
        np.concatenate([up, down]),
        np.repeat([True, False], len(up)),
    )


def _pipeline(uses: _Uses, num_chunks: int) -> Phase:
    firsts = np.array([0, (num_chunks + 1) // 2])
    sizes = np.diff(firsts, append=num_chunks)
    times = [(uses.moments[uses.trees == tree][:, None] + 2 * np.arange(sizes[tree])).ravel() for tree in range(2)]
    rounds = np.unique(np.concatenate(times))

    def make(index: int) -> Round:
        since = rounds[index] - uses.moments
        active = (since >= 0) & (since % 2 == 0) & (since // 2 < sizes[uses.trees])
        chunks = firsts[uses.trees] + since // 2
        return make_round(uses.sources, uses.destinations, chunks, active, adds=uses.adds)

    return Phase(len(rounds), make)
