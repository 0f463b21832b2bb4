"""A 2-D torus of ranks: both directions of the grid busy at once."""

from typing import ClassVar

import numpy as np
from pydantic import Field

from paceline.errors import SettingsError
from paceline.programs.base import Algorithm, Collective, Integers, Program, in_order, side_by_side
from paceline.programs.hierarchical import grid_phases, nearest_square_divisor
from paceline.registry import register


@register("torus")
class Torus(Algorithm):
    """Rings along the rows and columns of a grid (Mikami et al. 2018), half of the buffer each way round.

    The first half is reduced along rows and then along columns, the second half along columns and then along rows, at
    the same time, so that no link waits (Jain and Sabharwal 2010); then back. Ranks are numbered row by row.

    On the wire, of S bytes among r rows of c, n = r * c: all-reduce 2(r-1) + 2(c-1) rounds and 2(n-1)/n * S a rank, all
    of it to the next rank in its row and column. Reduce-scatter and all-gather half of it; a rank has a chunk of each
    half, see `Program.owners`. With one row it is the ring.
    """

    collectives: ClassVar = frozenset({Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER})

    num_rows: int | None = Field(default=None, ge=1)
    """Number of rows of the grid, a divisor of the ranks; None for the divisor nearest to their square root."""

    def _build(self, collective: Collective, num_ranks: int, root: int) -> Program:
        num_rows = self.num_rows or nearest_square_divisor(num_ranks)
        if num_ranks % num_rows:
            raise SettingsError(
                f"num_ranks must be a multiple of num_rows, but got {num_ranks} = "
                f"{num_ranks // num_rows} * {num_rows} + {num_ranks % num_rows}; change either"
            )
        num_chunks = self.num_chunks or 2 * num_ranks
        grid = np.arange(num_ranks).reshape(num_rows, -1)
        halves = [grid_phases(grid, 0, num_chunks // 2), grid_phases(grid.T, num_chunks // 2, num_chunks)]
        reduce_scatter = side_by_side([in_order(half[0]) for half in halves])
        all_gather = side_by_side([in_order(half[1]) for half in halves])
        phases = {
            Collective.ALL_REDUCE: [reduce_scatter, all_gather],
            Collective.REDUCE_SCATTER: [reduce_scatter],
            Collective.ALL_GATHER: [all_gather],
        }
        owners: Integers | None = np.concatenate([half[2] for half in halves])
        if collective == Collective.ALL_REDUCE:
            owners = None
        return Program.of_phases(collective, self.name, num_ranks, num_chunks, phases[collective], owners=owners)
