"""Steps, bytes and scaling efficiency of all-reduce algorithms on 2 to 1,024 nodes."""

from collections.abc import Callable
from math import exp, log2

import numpy as np
from pydantic import Field

from paceline.benchmarks.reproductions.predicted import (
    Amount,
    PredictedRow,
    PredictedTable,
    Several,
    counted,
    predicted,
    spread_of_parameter,
)
from paceline.programs import Collective, Program
from paceline.registry import register
from paceline.simulator.scaling import Scaling, fit_algorithm
from paceline.simulator.training.answers import QUANTILE
from paceline.topology import Cluster, Switch
from paceline.topology.units import BytesPerSecond

_ALGORITHMS = ("naive", "ring", "double_tree")
_STEPS: dict[str, Callable[[int], float]] = {
    "naive": lambda n: n - 1,
    "ring": lambda n: 2 * (n - 1),
    "double_tree": lambda n: 2 * log2(n),
}
"""Published steps of each on n nodes; 2(n-1)/n of the buffer are published as bytes of a rank for all of them."""
_WHY = {
    "naive": "one step more sends the sum back",
    "double_tree": "our program sends halves of the buffer in chunks, one behind the other: more and smaller steps",
}
"""Reasons for other steps than published ones."""


@register("all-reduce")
class AllReduceTable(PredictedTable):
    """Steps and bytes of all-reduce algorithms, and the scaling efficiency of a step that waits for them.

    Steps and bytes are counted in our programs. Efficiency is computing over computing and waiting, with the same
    work on each node: ResNet-50's gradients in fp32 after a tenth of a second, which the figure does not state.
    """

    num_nodes: tuple[Several, ...] = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    counted_nodes: tuple[Several, ...] = (8, 1024)
    """Numbers of nodes whose steps and bytes are counted."""
    cluster: Cluster = Switch()
    """Network of the nodes, one rank on each."""
    num_bytes: float = Field(default=102.2e6, gt=0)
    """Size of the buffer."""
    compute_s: float = Field(default=0.1, gt=0)
    """Time of computing in a step."""

    def reproduce(self) -> list[PredictedRow]:
        """Count and predict."""
        rows = [row for nodes in self.counted_nodes for name in _ALGORITHMS for row in self._count(name, nodes)]
        return rows + [row for nodes in self.num_nodes for row in self._compare(nodes)]

    def _count(self, name: str, nodes: int) -> list[PredictedRow]:
        program = fit_algorithm(name, self.cluster, nodes).build(Collective.ALL_REDUCE, nodes)
        steps, sent, published = program.num_rounds, _most_sent(program), _STEPS[name](nodes)
        share = 2 * (nodes - 1) / nodes
        in_steps = "" if steps == published else _WHY[name]
        in_bytes = "" if abs(sent / share - 1) < 0.02 else f"the busiest rank sends {sent / share:.3g} times as much"
        return [
            counted(f"{name} on {nodes:,} nodes: steps", steps, f"{published:.4g}", in_steps),
            counted(f"{name} on {nodes:,} nodes: buffers sent by the busiest rank", sent, f"{share:.4g}", in_bytes),
        ]

    def _compare(self, nodes: int) -> list[PredictedRow]:
        found = {name: self._predict(name, nodes) for name in _ALGORITHMS}
        best = max(found, key=lambda name: found[name][0])
        rows = []
        for name, ours in found.items():
            published = "0.5 to 1" + (", the highest" if name == "double_tree" else "")
            notes = [] if ours[2] >= 0.5 else ["below the whole figure"]
            if name == "double_tree" and best != name:
                is_sure = all(other > own for other, own in zip(found[best], ours, strict=True))
                notes.append(f"{best} is higher" + ("" if is_sure else ", by less than is known"))
            rows.append(predicted(f"{name} on {nodes:,} nodes: efficiency", ours, published, "; ".join(notes)))
        return rows

    def _predict(self, name: str, nodes: int) -> Amount:
        """Return the efficiency, and what it would be on a network that is worse or better by what is not known."""
        ours = [self._with_network(change).predict(name, nodes).efficiency for change in (0.0, 1.0, -1.0)]
        return ours[0], ours[1], ours[2]

    def _with_network(self, worse: float) -> Scaling:
        bandwidth, latency = (exp(QUANTILE * worse * spread_of_parameter(name)) for name in ("network", "latency"))
        cluster = self.cluster.model_copy(
            update={
                "bandwidth": BytesPerSecond(self.cluster.bandwidth / bandwidth),
                "latency_s": self.cluster.latency_s * latency,
                "message_s": self.cluster.message_s * latency,
            }
        )
        return Scaling(cluster=cluster, num_bytes=self.num_bytes, compute_s=self.compute_s)


def _most_sent(program: Program) -> float:
    """Return what the rank sends that sends most, in buffers."""
    sent = np.zeros(program.num_ranks)
    for round_ in program.rounds():
        np.add.at(sent, round_.sources, round_.counts)
    return float(sent.max()) / program.num_chunks
