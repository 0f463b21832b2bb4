"""`compare gossip`: what each graph does to decentralised SGD, beside all-reduce on the same samples."""

import statistics
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paceline.benchmarks.tables import TableRow
from paceline.comm.local_group import LocalGroup
from paceline.registry import Settings
from paceline.replica.replica import Replica
from paceline.sync import DPSGD, EveryStep, Rule
from paceline.topology.graphs import Graph

_NUM_INPUTS, _WIDTH = 8, 16
_REFERENCE = "all-reduce"
_GRAPHS = ("ring", "torus", "exponential", "one_peer_exponential", "random_pairs", "star", "complete")


@dataclass(frozen=True)
class GossipRow(TableRow):
    """One graph, of one number of workers, beside all-reduce; losses are paired by seed."""

    headings = (
        "graph", "workers", "spectral gap", "bytes a worker and step", "consensus distance", "held-out loss",
        "to all-reduce's",
    )  # fmt: skip

    graph: str
    num_workers: int
    num_seeds: int
    spectral_gap: float
    wire_bytes: float
    """Bytes that a worker sends in a step, the mean over workers and steps."""
    consensus_distance: float
    """Distance of workers from their mean after training, root mean square, relative to the mean's norm; the median
    over seeds."""
    loss: float
    """Held-out loss of the mean over workers; the median over seeds."""
    loss_ratio: float
    """Median over seeds of that loss to all-reduce's."""

    def cells(self) -> tuple[str, ...]:
        """Return it as texts."""
        return (
            self.graph,
            str(self.num_workers),
            f"{self.spectral_gap:.3f}",
            f"{self.wire_bytes:,.0f}",
            f"{self.consensus_distance:.2e}",
            f"{self.loss:.4f}",
            f"{self.loss_ratio:.3f}",
        )


@dataclass(frozen=True)
class _Trained:
    loss: float
    distance: float
    wire_bytes: float


class GossipComparison(Settings):
    """Trains a small network with workers that are threads, once for each graph, number of workers and seed."""

    num_workers: Annotated[tuple[Annotated[int, Field(ge=2)], ...], Field(min_length=1)] = (8, 16)
    """Numbers of workers."""
    graphs: tuple[Graph, ...] = tuple(Graph.model_validate(name) for name in _GRAPHS)
    """Graphs to compare."""
    num_seeds: int = Field(default=3, ge=1)
    """Runs of each, with seeds from 0 on."""
    num_steps: int = Field(default=100, ge=1)
    """Number of steps of each run."""
    learning_rate: float = Field(default=0.1, gt=0)
    """Learning rate of SGD, the same in all steps."""
    batch: int = Field(default=8, ge=1)
    """Samples of a worker and step."""
    skew: float = Field(default=0.0, ge=0, le=1)
    """Difference between workers' samples: 0, random samples as in training; 1, each worker has its own part of the
    range of an input."""

    def compare(self) -> list[GossipRow]:
        """Train, and return a row for all-reduce and each graph, for each number of workers."""
        rows = []
        for num_workers in self.num_workers:
            reference = self._train_all(EveryStep(), num_workers)
            rows.append(_describe(_REFERENCE, 1.0, num_workers, reference, reference))
            for graph in self.graphs:
                ours = self._train_all(DPSGD(graph=graph), num_workers)
                rows.append(_describe(graph.name, graph.spectral_gap(num_workers), num_workers, ours, reference))
        return rows

    def _train_all(self, rule: Rule, num_workers: int) -> list[_Trained]:
        results = []
        for seed in range(self.num_seeds):
            workers = LocalGroup.run(num_workers, lambda group, seed=seed: self._train(group, rule, seed))  # type: ignore[misc]
            distance = statistics.fmean(worker.distance**2 for worker in workers) ** 0.5
            wire_bytes = statistics.fmean(worker.wire_bytes for worker in workers)
            results.append(_Trained(workers[0].loss, distance, wire_bytes))
        return results

    def _train(self, group: LocalGroup, rule: Rule, seed: int) -> _Trained:
        """Train one worker, and return what came of it; its distance is its own."""
        module = _make_module(seed)
        optimizer = torch.optim.SGD(module.parameters(), lr=self.learning_rate)
        replica = Replica(module, optimizer, group=group, sync=rule, hash_interval=0)
        wire_bytes = 0
        generator = torch.Generator().manual_seed(1000 * seed + group.rank)
        for _ in range(self.num_steps):
            inputs, targets = self._draw(self.batch, group.rank / group.size, generator)
            replica.backward(F.mse_loss(replica(inputs), targets), weight=self.batch)
            wire_bytes += replica.update().wire_bytes
        own = _flat(module)
        generator.manual_seed(1000 * seed + 999)
        parts = [self._draw(64, rank / group.size, generator) for rank in range(group.size)]
        with replica.consensus(), torch.no_grad():
            mean = _flat(module)
            loss = statistics.fmean(float(F.mse_loss(module(inputs), targets)) for inputs, targets in parts)
        replica.close()
        return _Trained(loss, float((own - mean).norm() / mean.norm()), wire_bytes / self.num_steps)

    def _draw(self, num_samples: int, place: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return noisy samples of a fixed function, for the worker at a place in [0, 1) among all."""
        inputs = torch.randn(num_samples, _NUM_INPUTS, generator=generator)
        mixed = 2 * torch.rand(num_samples, generator=generator) - 1
        inputs[:, 0] = (1 - self.skew) * mixed + self.skew * (2 * place - 1 + 0.1 * inputs[:, 0])
        clean = torch.stack([(2 * inputs[:, 0]).sin() + inputs[:, 1], inputs[:, 2] - inputs[:, 3].tanh()], 1)
        return inputs, clean + 0.2 * torch.randn(num_samples, 2, generator=generator)


def _describe(
    name: str, spectral_gap: float, num_workers: int, ours: list[_Trained], reference: list[_Trained]
) -> GossipRow:
    return GossipRow(
        graph=name,
        num_workers=num_workers,
        num_seeds=len(ours),
        spectral_gap=spectral_gap,
        wire_bytes=statistics.fmean(each.wire_bytes for each in ours),
        consensus_distance=statistics.median(each.distance for each in ours),
        loss=statistics.median(each.loss for each in ours),
        loss_ratio=statistics.median(a.loss / b.loss for a, b in zip(ours, reference, strict=True)),
    )


def _make_module(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(_NUM_INPUTS, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 2))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return module


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
