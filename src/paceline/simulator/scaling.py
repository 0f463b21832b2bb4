"""How a collective, and the training that waits for it, scale with ranks: by algorithm and by bandwidth."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from paceline.errors import SettingsError
from paceline.programs import Algorithm, Collective, Hierarchical, Program, Torus, find_algorithm
from paceline.registry import Settings
from paceline.simulator.program import Cost, simulate, simulate_each
from paceline.topology import Cluster, Switch
from paceline.topology.torus import TorusCluster


@dataclass(frozen=True)
class Prediction:
    """One point of a scaling curve."""

    algorithm: str
    num_ranks: int
    bandwidth_bytes_per_s: float
    total_s: float
    """Time of the collective."""
    add_s: float
    """Time of adding, a part of `total_s`."""
    exposed_s: float
    """Part of `total_s` that computing does not hide."""
    efficiency: float
    """Time of computing divided by that of a whole step."""


class Scaling(Settings):
    """A training step on more and more ranks: every rank computes for the same time, then waits for the collective.

    Its efficiency is ``compute_s / (compute_s + exposed_s)``, as in weak scaling.
    """

    collective: Collective = Collective.ALL_REDUCE
    cluster: Cluster = Switch()
    num_ranks: tuple[Annotated[int, Field(ge=1)], ...] = (2, 4, 8, 16, 32, 64)
    num_bytes: float = Field(default=100e6, gt=0)
    """Size of the buffer: a rank's data before the collective or after it, whichever is more."""
    compute_s: float = Field(default=0.1, gt=0)
    """Time of computing in a step."""
    overlap: float = Field(default=0.0, ge=0, le=1)
    """Share of computing during which the collective can run hidden."""
    own_pace: bool = False
    """Whether ranks run at their own pace; see `simulate`."""

    def predict(self, algorithm: str, num_ranks: int, bandwidth: float | None = None) -> Prediction:
        """Return one point of a curve, at the cluster's bandwidth or another.

        Raises:
            SettingsError: There is no such algorithm, or it lacks that collective for that number of ranks.
        """
        return self.predict_each(algorithm, num_ranks, [self.cluster.bandwidth if bandwidth is None else bandwidth])[0]

    def predict_each(self, algorithm: str, num_ranks: int, bandwidths: Iterable[float]) -> list[Prediction]:
        """Return the points of the curves at these bandwidths; what they share is computed once.

        Raises:
            SettingsError: There is no such algorithm, or it lacks that collective for that number of ranks.
        """
        clusters = [self.cluster.with_bandwidth(bandwidth) for bandwidth in bandwidths]
        program = fit_algorithm(algorithm, self.cluster, num_ranks).build(self.collective, num_ranks)
        networks = [cluster.network(num_ranks) for cluster in clusters]
        costs = simulate_each(
            program,
            _whole_bytes(program, self.num_bytes),
            networks[0],
            [network.capacities_bytes_per_s for network in networks],
            own_pace=self.own_pace,
        )
        exposed_s = [max(0.0, cost.total_s - self.overlap * self.compute_s) for cost in costs]
        return [
            Prediction(
                algorithm=algorithm,
                num_ranks=num_ranks,
                bandwidth_bytes_per_s=float(cluster.bandwidth),
                total_s=cost.total_s,
                add_s=cost.add_s,
                exposed_s=exposed,
                efficiency=self.compute_s / (self.compute_s + exposed),
            )
            for cluster, cost, exposed in zip(clusters, costs, exposed_s, strict=True)
        ]

    def predict_all(
        self, algorithms: Iterable[str], bandwidths: Iterable[float]
    ) -> tuple[list[Prediction], dict[str, str]]:
        """Return all points of the curves, and the reason of each algorithm that lacks some."""
        predictions: list[Prediction] = []
        refusals: dict[str, str] = {}
        for algorithm in algorithms:
            find_algorithm(algorithm)
            for num_ranks in self.num_ranks:
                try:
                    predictions += self.predict_each(algorithm, num_ranks, bandwidths)
                except SettingsError as error:
                    refusals.setdefault(algorithm, str(error))
        return predictions, refusals


def simulate_collective(
    collective: str,
    num_bytes: float,
    num_ranks: int,
    cluster: Cluster,
    *,
    algorithm: str = "ring",
    own_pace: bool = False,
) -> Cost:
    """Return the cost of a collective given by its name, as in the traffic of a synchronisation rule.

    Args:
        collective: Name of the collective.
        num_bytes: Size of the buffer; for an all-to-all, one rank's data for all ranks.
        num_ranks: Number of ranks that take part.
        cluster: Cluster to run on.
        algorithm: Name of the algorithm; its settings are fitted to the cluster.
        own_pace: Whether ranks run at their own pace; see `simulate`.
    """
    program = fit_algorithm(algorithm, cluster, num_ranks).build(Collective(collective), num_ranks)
    return simulate(program, _whole_bytes(program, num_bytes), cluster, own_pace=own_pace)


def _whole_bytes(program: Program, num_bytes: float) -> float:
    """Return the size of what a program's chunks are parts of, where `num_bytes` is a rank's buffer."""
    return num_bytes * program.num_ranks if program.collective == Collective.ALL_TO_ALL else num_bytes


def fit_algorithm(name: str, cluster: Cluster, num_ranks: int) -> Algorithm:
    """Return an algorithm with the settings that fit a cluster: its hosts, its grid."""
    variant = find_algorithm(name)
    island = min(cluster.devices_per_island, num_ranks)
    if issubclass(variant, Hierarchical) and island > 1:
        return variant(ranks_per_host=island)
    if issubclass(variant, Torus) and isinstance(cluster, TorusCluster) and cluster.shape:
        return variant(num_rows=cluster.shape[0])
    return variant()
