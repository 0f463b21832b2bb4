"""How ranks share the work: the axes of a mesh, their lengths, and the coordinates of a rank on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal, get_args

from pydantic import Field

from paceline.errors import SettingsError
from paceline.registry import Settings

Axis = Literal["pipeline", "data", "sharded", "expert", "context", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""Outermost first: ranks that differ on the last axis are neighbours, so that the busiest axes stay inside a host."""


class Layout(Settings):
    """Number of ranks along each axis of parallelism. The product of all axes is the number of ranks."""

    data: int | None = Field(default=None, ge=1)
    """Replicas of the model, each with its own samples; by default as many as the other axes leave."""
    sharded: int = Field(default=1, ge=1)
    """Ranks that share parameters, gradients and optimizer state of one replica, each with its own samples (ZeRO,
    FSDP)."""
    zero_stage: Literal[1, 2, 3] = 3
    """State that `sharded` ranks share (Rajbhandari 2020): 1 optimizer state, 2 gradients too, 3 parameters too."""
    expert: int = Field(default=1, ge=1)
    """Ranks that share the experts of mixture-of-experts layers, each with its own samples."""
    context: int = Field(default=1, ge=1)
    """Ranks that share each sample's sequence."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that share each matrix."""
    pipeline: int = Field(default=1, ge=1)
    """Ranks that each hold one part of the layers."""

    def resolve(self, num_ranks: int) -> "Axes":
        """Return the axes of `num_ranks` ranks.

        Raises:
            SettingsError: The axes do not multiply to it; the message shows the arithmetic.
        """
        sizes: dict[Axis, int] = {axis: getattr(self, axis) or 1 for axis in AXES}
        if self.data is None:
            others = prod(sizes.values())
            if num_ranks % others:
                raise SettingsError(
                    f"the ranks must be a multiple of {_product(sizes)}, but got {num_ranks}; start "
                    f"{-(-num_ranks // others) * others}, or change the layout"
                )
            sizes["data"] = num_ranks // others
        if prod(sizes.values()) != num_ranks:
            raise SettingsError(
                f"the axes of a layout must multiply to the number of ranks, but {_product(sizes, show_data=True)} and "
                f"num_ranks={num_ranks}; start {prod(sizes.values())} ranks, or change the layout"
            )
        return Axes(tuple(sizes[axis] for axis in AXES))

    @property
    def ranks_of_worker(self) -> int:
        """Number of ranks of one worker: those that see the same samples."""
        return self.context * self.tensor * self.pipeline

    @property
    def workers_of_replica(self) -> int:
        """Number of workers that hold one replica of the model together."""
        return self.sharded * self.expert

    @property
    def default_workers(self) -> int:
        """Number of workers where none is given: as many as the layout needs, or two if it has no axis."""
        return 2 if self.is_plain and self.data is None else (self.data or 1) * self.workers_of_replica

    @property
    def shards_optimizer(self) -> bool:
        """Whether ranks with complete parameters share the optimizer's state."""
        return self.sharded > 1 and self.zero_stage == 1

    @property
    def shards_parameters(self) -> bool:
        """Whether the sharded axis splits gradients, or parameters too."""
        return self.sharded > 1 and self.zero_stage > 1

    @property
    def is_plain(self) -> bool:
        """Whether there are only data-parallel replicas."""
        return self.workers_of_replica * self.ranks_of_worker == 1


@dataclass(frozen=True)
class Axes:
    """The axes of a layout, each with its length: `sizes` in the order of `AXES`."""

    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the whole mesh."""
        return prod(self.sizes)

    def size(self, *axes: Axis) -> int:
        """Return the number of ranks on `axes` together."""
        return prod(self.sizes[AXES.index(axis)] for axis in axes)

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Return the coordinate of `rank` on `axis`."""
        return self._coordinates(rank)[AXES.index(axis)]

    def ranks_along(self, rank: int, *axes: Axis) -> list[int]:
        """Return the ranks with the coordinates of `rank` except on `axes`, ascending."""
        mine = self._coordinates(rank)
        ranges = [
            range(size) if axis in axes else [place] for axis, size, place in zip(AXES, self.sizes, mine, strict=True)
        ]
        return sorted(self._rank_at(place) for place in product(*ranges))

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        places = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)
            places.append(place)
        return tuple(reversed(places))

    def _rank_at(self, places: Sequence[int]) -> int:
        rank = 0
        for size, place in zip(self.sizes, places, strict=True):
            rank = rank * size + place
        return rank


def _product(sizes: dict[Axis, int], *, show_data: bool = False) -> str:
    named = [(axis, size) for axis, size in sizes.items() if size > 1 or (show_data and axis == "data")]
    return f"{' * '.join(f'{axis}({size})' for axis, size in named)} = {prod(size for _, size in named)}"
