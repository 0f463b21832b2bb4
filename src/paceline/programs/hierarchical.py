"""Rings inside hosts, between hosts, and inside hosts again: few bytes on the slow links."""

import math
from itertools import pairwise
from typing import ClassVar

import numpy as np
from pydantic import Field

from paceline.errors import SettingsError
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
from paceline.programs.ring import ring_all_gather, ring_reduce_scatter
from paceline.registry import register


@register("hierarchical")
class Hierarchical(Algorithm):
    """Rings inside hosts, and rings between hosts on the slice that each rank has summed (Jia et al. 2018).

    Ranks are numbered host by host. All ranks of a host send between hosts, each its own slice to the ranks with the
    same index in other hosts; there is no leader that sends all.

    On the wire, of S bytes among h hosts of m ranks: all-reduce 2(m-1) + 2(h-1) rounds, in which a rank sends 2(m-1)/m
    * S inside its host and 2(h-1)/h * S/m between hosts. Reduce-scatter and all-gather half of it; the r-th chunk is
    not rank r's, see `Program.owners`. Broadcast is a chain of hosts with a chain in each, pipelined: S a rank, 2 * S
    at the start of both. All-to-all moves everything inside the host to the rank with the destination's index, then
    between hosts: m + h - 2 rounds, (m-1)/m * S and (h-1)/h * S, in h times fewer messages between hosts than direct
    exchange has. With one rank a host, or one host, it is the ring (all-to-all: direct exchange).
    """

    collectives: ClassVar = frozenset(Collective)

    ranks_per_host: int | None = Field(default=None, ge=1)
    """Number of ranks of each host, a divisor of the ranks; None for the divisor nearest to their square root."""

    def _build(self, collective: Collective, num_ranks: int, root: int) -> Program:
        ranks_per_host = self.ranks_per_host or nearest_square_divisor(num_ranks)
        if num_ranks % ranks_per_host:
            raise SettingsError(
                f"num_ranks must be a multiple of ranks_per_host, but got {num_ranks} = "
                f"{num_ranks // ranks_per_host} * {ranks_per_host} + {num_ranks % ranks_per_host}; change either"
            )
        hosts = np.arange(num_ranks).reshape(-1, ranks_per_host)
        if collective == Collective.ALL_TO_ALL:
            return Program.of_phases(collective, self.name, num_ranks, num_ranks**2, _all_to_all(hosts))
        num_chunks = self.num_chunks or num_ranks
        if collective == Collective.BROADCAST:
            chains = tree_broadcast(_chains(hosts, root), num_chunks)
            return Program.of_phases(collective, self.name, num_ranks, num_chunks, [chains], root=root)
        reduce_scatter, all_gather, owners = grid_phases(hosts, 0, num_chunks)
        if collective == Collective.ALL_REDUCE:
            return Program.of_phases(collective, self.name, num_ranks, num_chunks, [*reduce_scatter, *all_gather])
        phases = reduce_scatter if collective == Collective.REDUCE_SCATTER else all_gather
        return Program.of_phases(collective, self.name, num_ranks, num_chunks, phases, owners=owners)


def nearest_square_divisor(number: int) -> int:
    """Return the largest divisor of `number` that is not above its square root."""
    return next(divisor for divisor in range(math.isqrt(number), 0, -1) if number % divisor == 0)


def grid_phases(grid: Integers, begin: int, end: int) -> tuple[list[Phase], list[Phase], Integers]:
    """Return reduce-scatter, all-gather and owners of chunks from `begin` to `end`: rings along rows, then columns.

    Args:
        grid: Ranks, shape ``(num_rows, num_columns)``.
        begin: First chunk.
        end: Chunk after the last.
    """
    num_rows, num_columns = grid.shape
    slices = begin + chunk_bounds(end - begin, num_columns)
    row_bounds = np.tile(slices, (num_rows, 1))
    column_bounds = np.stack(
        [first + chunk_bounds(after - first, num_rows) for first, after in pairwise(slices.tolist())]
    )
    reduce_scatter = [ring_reduce_scatter(grid, row_bounds), ring_reduce_scatter(grid.T, column_bounds)]
    all_gather = [ring_all_gather(grid.T, column_bounds), ring_all_gather(grid, row_bounds)]
    return reduce_scatter, all_gather, np.repeat(grid.T.ravel(), np.diff(column_bounds, axis=1).ravel())


def _chains(hosts: Integers, root: int) -> Integers:
    """Return each rank's parent: the root's peers hang on each other host by host, all others inside their host."""
    host, place = np.divmod(np.arange(hosts.size), hosts.shape[1])
    root_host, root_place = divmod(root, hosts.shape[1])
    between = (host - 1) % hosts.shape[0] * hosts.shape[1] + place
    inside = host * hosts.shape[1] + (place - 1) % hosts.shape[1]
    parents: Integers = np.where(place == root_place, between, inside)
    parents[root_host * hosts.shape[1] + root_place] = -1
    return parents


def _all_to_all(hosts: Integers) -> list[Phase]:
    num_hosts, ranks_per_host = hosts.shape
    num_ranks = hosts.size
    host, place, other = np.indices((num_hosts, ranks_per_host, num_hosts))
    origins = host * ranks_per_host + place

    def inside(index: int) -> Round:
        """Send the data for a rank of another index to the rank with that index in this host."""
        place_after = (place + 1 + index) % ranks_per_host
        chunks = origins * num_ranks + other * ranks_per_host + place_after
        return make_round(origins, host * ranks_per_host + place_after, chunks, 1, adds=False)

    def between(index: int) -> Round:
        """Send this host's data for the rank with the same index in another host."""
        host, origin_place, place = np.indices((num_hosts, ranks_per_host, ranks_per_host))
        destinations = (host + 1 + index) % num_hosts * ranks_per_host + place
        chunks = (host * ranks_per_host + origin_place) * num_ranks + destinations
        return make_round(host * ranks_per_host + place, destinations, chunks, 1, adds=False)

    return [Phase(ranks_per_host - 1, inside), Phase(num_hosts - 1, between)]
