"""Gossip graphs: which ranks mix their models in a step, and with which weights.

A graph has directed edges (source, destination); one whose edges all go both ways is undirected. Its mixing matrix W
gives the models x after a step: rank i has ``sum_j W[i, j] x_j``.
"""

from abc import abstractmethod
from typing import Annotated, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from paceline.errors import SettingsError
from paceline.registry import Family, register
from paceline.topology.torus import squarest

Floats = NDArray[np.float64]
Edges = set[tuple[int, int]]
"""Pairs (source, destination) of different ranks."""
Rank = Annotated[int, Field(ge=0)]

_SMALL = 1e-12
"""Tolerance of computed sums."""


class Graph(Family):
    """Settings of a kind of graph, for any number of ranks from 1 on.

    Attributes:
        is_static: Whether edges stay the same from step to step.
    """

    family = "graph"
    is_static: ClassVar[bool] = True

    @abstractmethod
    def find_edges(self, num_ranks: int, step: int = 0) -> Edges:
        """Return the edges of a step.

        Raises:
            SettingsError: The graph does not exist for that number of ranks.
        """

    def num_phases(self, num_ranks: int) -> int | None:
        """Return the number of steps after which it repeats: 1 for a static graph, None for one that never repeats."""
        return 1

    def mixing_matrix(self, num_ranks: int, step: int = 0) -> Floats:
        """Return W of a step, of shape (num_ranks, num_ranks).

        Undirected graphs have Metropolis weights, ``W[i, j] = 1 / (1 + max(degree_i, degree_j))`` with the rest on the
        diagonal, so that W is symmetric and doubly stochastic (Xiao, Boyd 2004). In directed ones a rank divides its
        model evenly among itself and those it sends to: columns sum to 1, and rows too where all degrees are equal.

        Raises:
            SettingsError: The graph does not exist for that number of ranks.
        """
        return mix_over(self.find_edges(num_ranks, step), num_ranks)

    def spectral_gap(self, num_ranks: int) -> float:
        """Return 1 less the factor by which disagreement shrinks per step, in the long run.

        That factor is the second largest modulus of an eigenvalue of W, or, if the graph changes, of the product of the
        W of a whole cycle, to the power of 1 / num_phases. The gap is 0 for a disconnected graph and 1 for exact
        averaging.
        """
        num_phases = self.num_phases(num_ranks)
        assert num_phases is not None, "a graph that never repeats must say it by itself"
        product = np.eye(num_ranks)
        for step in range(num_phases):
            product = self.mixing_matrix(num_ranks, step) @ product
        moduli = np.sort(np.abs(np.linalg.eigvals(product)))
        second = moduli[-2] if num_ranks > 1 else 0.0
        return float(1 - (second if second > _SMALL else 0.0) ** (1 / num_phases))


@register("ring")
class RingGraph(Graph):
    """Each rank with the ranks before and after it. Its gap shrinks with the square of the number of ranks."""

    def find_edges(self, num_ranks: int, step: int = 0) -> Edges:
        """Return the edges of the ring."""
        return _circulant(num_ranks, (1, -1))


@register("torus")
class TorusGraph(Graph):
    """Each rank with its neighbours on a grid with joined ends: four, or three with two rows, or two with one row."""

    shape: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None
    """Rows and columns; None: as nearly square as the number of ranks allows."""

    def find_edges(self, num_ranks: int, step: int = 0) -> Edges:
        """Return the edges of the torus."""
        rows, columns = self.shape or squarest(num_ranks)
        if rows * columns != num_ranks:
            raise SettingsError(
                f"shape must have as many cells as there are ranks, {num_ranks}, but got {rows} x {columns} = "
                f"{rows * columns}; leave it out, or give another"
            )
        ranks = np.arange(num_ranks).reshape(rows, columns)
        neighbours = [np.roll(ranks, shift, axis) for axis in (0, 1) for shift in (1, -1)]
        pairs = {(int(a), int(b)) for other in neighbours for a, b in zip(ranks.flat, other.flat, strict=True)}
        return {(source, destination) for source, destination in pairs if source != destination}


@register("exponential")
class ExponentialGraph(Graph):
    """Each rank sends to those 1, 2, 4, 8, ... ranks after it (Ying et al. 2021, "Exponential Graph is Provably ...").

    It is directed, yet doubly stochastic. With ceil(log2 n) messages a step its gap is about 2 / log2 n.
    """

    def find_edges(self, num_ranks: int, step: int = 0) -> Edges:
        """Return the edges of every step."""
        return _circulant(num_ranks, _powers_below(num_ranks))


@register("one_peer_exponential")
class OnePeerExponentialGraph(Graph):
    """One message a step: to the rank 1 after, then 2, then 4, ..., and from the start (Assran 2019, Ying et al. 2021).

    For a number of ranks that is a power of two, n = 2^k, every k steps give the exact average; for others they do not.
    """

    is_static = False

    def find_edges(self, num_ranks: int, step: int = 0) -> Edges:
        """Return the edges of the step."""
        shifts = _powers_below(num_ranks)
        return _circulant(num_ranks, shifts[step % len(shifts) :][:1]) if shifts else set()

    def num_phases(self, num_ranks: int) -> int | None:
        """Return one phase for each power of two."""
        return max(1, len(_powers_below(num_ranks)))


@register("random_pairs")
class RandomPairsGraph(Graph):
    """In each step ranks are paired at random, and both ranks of a pair take their average (Boyd et al. 2006).

    With an odd number one rank stays alone. All ranks draw the same pairs.
    """

    is_static = False
    seed: int = Field(default=0, ge=0)
    """Seed of the pairs."""

    def find_edges(self, num_ranks: int, step: int = 0) -> Edges:
        """Return the pairs of the step."""
        order = np.random.default_rng((self.seed, step)).permutation(num_ranks).tolist()
        pairs = list(zip(order[::2], order[1::2], strict=False))
        return {(a, b) for a, b in pairs} | {(b, a) for a, b in pairs}

    def num_phases(self, num_ranks: int) -> int | None:
        """Return None: it never repeats."""
        return None

    def spectral_gap(self, num_ranks: int) -> float:
        """Return the gap for the expected squared disagreement, which E[W] shrinks, since every W is a projection."""
        if num_ranks <= 2:
            return 1.0
        square = 0.5 if num_ranks % 2 else (num_ranks - 2) / (2 * (num_ranks - 1))
        return float(1 - np.sqrt(square))


@register("complete")
class CompleteGraph(Graph):
    """Every rank with every other: one step is the exact average, at n - 1 messages a rank."""

    def find_edges(self, num_ranks: int, step: int = 0) -> Edges:
        """Return all edges."""
        return _circulant(num_ranks, range(1, num_ranks))


@register("star")
class StarGraph(Graph):
    """Rank 0 with every other rank: it has n - 1 messages a step, the others one."""

    def find_edges(self, num_ranks: int, step: int = 0) -> Edges:
        """Return the edges of the star."""
        return {edge for other in range(1, num_ranks) for edge in ((0, other), (other, 0))}


@register("edge_list")
class EdgeListGraph(Graph):
    """Edges from a list: ``--sync.graph edge_list --sync.graph.edges '[[0, 1], [1, 2]]'``."""

    edges: tuple[tuple[Rank, Rank], ...] = ()
    """Pairs of ranks; if directed, from the first to the second."""
    is_directed: bool = False
    """Whether edges go one way only. Then columns of the mixing matrix sum to 1, which only push-sum can use."""

    @model_validator(mode="after")
    def _check_edges(self) -> Self:
        loops = [source for source, destination in self.edges if source == destination]
        if loops:
            raise SettingsError(
                f"an edge must join two ranks, but got {loops[0]} with itself; leave it out: "
                "a rank's own weight is computed"
            )
        return self

    def find_edges(self, num_ranks: int, step: int = 0) -> Edges:
        """Return the edges of the list.

        Raises:
            SettingsError: An edge has an unknown rank, or the graph is not connected.
        """
        unknown = sorted({rank for edge in self.edges for rank in edge if rank >= num_ranks})
        if unknown:
            raise SettingsError(
                f"edges must join ranks from 0 to {num_ranks - 1}, but got {unknown[0]}; "
                f"remove it, or use more than {unknown[-1]} workers"
            )
        edges = set(self.edges) | (set() if self.is_directed else {(b, a) for a, b in self.edges})
        _check_connected(edges, num_ranks)
        return edges


def mix_over(edges: Edges, num_ranks: int) -> Floats:
    """Return the mixing matrix of edges; see `Graph.mixing_matrix`."""
    adjacency = np.zeros((num_ranks, num_ranks))
    for source, destination in edges:
        adjacency[destination, source] = 1
    degrees = adjacency.sum(0)
    is_undirected = np.array_equal(adjacency, adjacency.T)
    mixing: Floats = adjacency / (1 + (np.maximum.outer(degrees, degrees) if is_undirected else degrees))
    np.fill_diagonal(mixing, 1 - mixing.sum(0))
    return mixing


def is_doubly_stochastic(mixing: Floats) -> bool:
    """Whether no weight is negative, and rows and columns sum to 1: then mixing preserves the mean."""
    sums = np.concatenate([mixing.sum(0), mixing.sum(1)])
    return bool((mixing >= -_SMALL).all() and np.allclose(sums, 1, rtol=0, atol=_SMALL))


def _circulant(num_ranks: int, shifts: "range | tuple[int, ...]") -> Edges:
    edges = {(rank, (rank + shift) % num_ranks) for rank in range(num_ranks) for shift in shifts}
    return {(source, destination) for source, destination in edges if source != destination}


def _powers_below(number: int) -> tuple[int, ...]:
    return tuple(2**power for power in range((number - 1).bit_length()))


def _check_connected(edges: Edges, num_ranks: int) -> None:
    for away, words in ((0, "to rank {}"), (1, "from rank {}")):
        reached, waiting = {0}, [0]
        while waiting:
            here = waiting.pop()
            new = {edge[1 - away] for edge in edges if edge[away] == here} - reached
            reached |= new
            waiting.extend(new)
        missing = sorted(set(range(num_ranks)) - reached)
        if missing:
            raise SettingsError(
                f"edges must connect all {num_ranks} ranks, but rank 0 has no path {words.format(missing[0])}; "
                f"add an edge to rank {missing[0]}, or from a rank joined to it to one of the others"
            )
