"""A torus: every device has a cable to its neighbours on each dim, and the ends are joined."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from paceline.errors import SettingsError
from paceline.registry import register
from paceline.topology.cluster import Cluster, Integers, Network, Paths
from paceline.topology.units import BytesPerSecond

Shape = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, max_length=3)]


@register("torus")
class TorusCluster(Cluster):
    """Devices on a ring, a 2-D or a 3-D torus (TPU pods, K computer), row by row.

    A message goes along the last dim first, then the one before, each the shorter way round. On every cable it shares
    the bandwidth with the other messages there.
    """

    bandwidth: BytesPerSecond = BytesPerSecond.parse("50GB/s")
    """Bandwidth of one cable, each way."""
    latency_s: float = Field(default=1e-6, ge=0)
    """Latency of one cable."""
    shape: Shape | None = None
    """Devices on each dim; None: two dims, as nearly square as the number of ranks allows."""

    @property
    def paths(self) -> Paths:
        """Speeds of one ring on each dim, each both ways, that share the data."""
        speed = 2.0 * len(self.shape or (0, 0)) * self.bandwidth
        return Paths(1, speed, self.latency_s, speed, self.latency_s)

    def network(self, num_ranks: int) -> Network:
        """Return two links, there and back, for each device and dim."""
        shape = self.shape or squarest(num_ranks)
        if math.prod(shape) < num_ranks:
            product = " x ".join(str(size) for size in shape)
            raise SettingsError(
                f"ranks must be at most the torus, {product} = {math.prod(shape)}, but got {num_ranks}; enlarge shape"
            )
        num_links = 2 * len(shape) * math.prod(shape)
        return Network(
            capacities_bytes_per_s=np.full(num_links, float(self.bandwidth)),
            latencies_s=np.full(num_links, self.latency_s),
            route=_TorusRoutes(shape),
            reduce_bytes_per_s=self.reduce_speed,
            message_s=self.message_s,
        )


def squarest(num_ranks: int) -> tuple[int, int]:
    """Return two factors of `num_ranks`, the smaller first, that are as close to each other as possible."""
    rows = next(size for size in range(math.isqrt(num_ranks), 0, -1) if num_ranks % size == 0)
    return rows, num_ranks // rows


@dataclass(frozen=True)
class _TorusRoutes:
    """Dimension-ordered routes. Link ``2 * (device * num_dims + dim)`` goes up the dim, the next one down it."""

    shape: tuple[int, ...]

    def __call__(self, sources: Integers, destinations: Integers) -> Integers:
        here = np.stack(np.unravel_index(sources, self.shape), axis=1)
        goal = np.stack(np.unravel_index(destinations, self.shape), axis=1)
        columns = []
        for dim in reversed(range(len(self.shape))):
            size = self.shape[dim]
            ahead = (goal[:, dim] - here[:, dim]) % size
            goes_up = 2 * ahead <= size
            hops = np.where(goes_up, ahead, size - ahead)
            for hop in range(int(hops.max(initial=0))):
                moves = hop < hops
                devices = np.ravel_multi_index(tuple(here.T), self.shape)
                columns.append(np.where(moves, 2 * (devices * len(self.shape) + dim) + ~goes_up, -1))
                here[:, dim] = (here[:, dim] + np.where(moves, np.where(goes_up, 1, -1), 0)) % size
        return np.stack(columns, axis=1) if columns else np.full((len(sources), 1), -1, dtype=np.int64)
