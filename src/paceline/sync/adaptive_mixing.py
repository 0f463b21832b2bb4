"""Decentralised SGD whose graph follows the distance of workers, and the speed of their links."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from paceline.comm.group import Group
from paceline.errors import SettingsError
from paceline.registry import register
from paceline.sync.dpsgd import DPSGDSynchroniser, check_keeps_mean
from paceline.sync.gossip import FlatParameters, GossipRule, MixingRow
from paceline.sync.synchroniser import Abandoned, LocalStep, Synchroniser, SyncResult, WorkerContext
from paceline.topology.graph_choice import choose_edges
from paceline.topology.graphs import CompleteGraph, Edges, Floats, Graph, mix_over

_NUM_BUCKETS = 1024
"""Size of a sketch: distances are known within about sqrt(2 / 1024) = 4%."""
_GROWTH = 1.5
_NUM_PROBES = 3
_MOST_PROBE_BYTES = 2**18


@register("adaptive_mixing")
class AdaptiveMixing(GossipRule):
    """D-PSGD with a graph that is chosen again every `interval` steps, from measurements.

    Consensus control (Kong et al. 2021, arXiv:2102.04828): decentralised training loses nothing as long as the distance
    of workers from their mean stays below a bound in proportion to their steps. So the graph gets half as many edges
    again when the distance is more than `target` times the length of a step, and a third less when it is below half of
    that. The chosen edges are those of the fastest links that connect all, then those that help most for their time
    (`choose_edges`), among `candidates`. They have Metropolis weights, so that W is doubly stochastic; rank
    0 chooses, and all change at the same step. Between two choices, or if there is nothing to choose, it is dpsgd. It
    pays where some links are slower than others; among equal ones take dpsgd, which measures nothing.

    On the wire is one message of the parameters to each neighbour and step; `traffic` states it for the first graph. A
    choice adds a sketch of 8 KiB a worker and `probe_bytes`, a few times there and back, on each candidate link. Each
    worker clips its own gradient. Measurements differ from run to run, so that runs repeat bit for bit only from one
    choice to the next; the choice is in the checkpoint. It differs from the paper in that the graph changes, and not
    the number of mixing rounds, and in that distances are sketched and not estimated from neighbours.
    """

    interval: int = Field(default=100, ge=1)
    """Steps from one choice to the next; the first steps run on `graph`."""
    candidates: Graph = CompleteGraph()
    """Links that may be chosen."""
    target: float = Field(default=4.0, gt=0)
    """Desired distance of workers from their mean, in lengths of a step. It is about 1 with a complete
    graph, and grows with momentum."""
    probe_bytes: int | None = Field(default=None, ge=1)
    """Size of the messages that measure links; None for the model's, at most 256 KiB."""

    def start_mixing(self, context: WorkerContext) -> Synchroniser:
        """Return the synchroniser that mixes.

        Raises:
            SettingsError: Graph or candidates do not exist for that number of workers, or do not preserve their mean.
        """
        check_keeps_mean(self, context.group)
        edges = self.candidates.find_edges(context.group.size)
        if not (self.graph.is_static and self.candidates.is_static):
            raise SettingsError(
                "graph and candidates of adaptive_mixing must stay the same from step to step, but got "
                f"{self.graph.name} and {self.candidates.name}; take ring and complete, or sync dpsgd"
            )
        return AdaptiveSynchroniser(context, self, edges | {(b, a) for a, b in edges})

    def choose_num_pairs(self, num_pairs: int, distance: float, step_length: float) -> int:
        """Return the number of pairs of workers to join from now on, before bounds.

        Args:
            num_pairs: Number of pairs joined so far.
            distance: Distance of workers from their mean, root mean square.
            step_length: Length of the optimizer's steps, root mean square.
        """
        if distance > self.target * step_length:
            return int(np.ceil(num_pairs * _GROWTH))
        return int(num_pairs / _GROWTH) if distance < self.target * step_length / 2 else num_pairs


class AdaptiveSynchroniser(Synchroniser):
    """Mixes like D-PSGD, and chooses another graph from time to time.

    Args:
        context: The worker's model, optimizer and group.
        rule: Settings of the rule.
        candidates: Edges that may be chosen, both ways.
    """

    def __init__(self, context: WorkerContext, rule: AdaptiveMixing, candidates: Edges) -> None:
        self._context, self._rule, self._candidates = context, rule, candidates
        self._group = context.group.on_cpu().duplicate("links")
        self._flat = FlatParameters(context.parameters)
        self._use(rule.graph.mixing_matrix(context.group.size))
        self._mixing = DPSGDSynchroniser(context, lambda step: self._row)
        self._edges: Edges | None = None
        """Chosen edges; None before the first choice."""
        self._before: Tensor | None = None
        """Parameters before the optimizer's step, if the graph is chosen again after it."""

    def before_update(self, step: LocalStep) -> None:
        """Mix."""
        self._mixing.before_update(step)
        is_due = (step.number + 1) % self._rule.interval == 0
        self._before = self._flat.read() if is_due else None

    def after_update(self, step: LocalStep) -> SyncResult:
        """Choose another graph if it is due, and begin to send."""
        began_s, wire_bytes = time.perf_counter(), 0
        if self._before is not None:
            wire_bytes = self._choose_together(self._before)
            self._before = None
        waited_s = time.perf_counter() - began_s
        mixed = self._mixing.after_update(step)
        return SyncResult(mixed.waited_s + waited_s, mixed.wire_bytes + wire_bytes)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the mean over workers."""
        with self._mixing.consensus():
            yield

    def abandon(self) -> Abandoned:
        """Drop the swap, and a choice that was under way."""
        self._before = None
        return self._mixing.abandon()

    def repair(self, *, is_new: bool) -> str:
        """Mix on the first graph until the next choice: links are to other workers now."""
        self._edges = None
        self._use(self._rule.graph.mixing_matrix(self._context.group.size))
        words = self._mixing.repair(is_new=is_new)
        return "; ".join(filter(None, (words, "workers mix on the first graph until the next choice")))

    def last_mixed(self) -> Mapping[int, int]:
        """Return the number of updates of each neighbour's model when it was mixed in last, by rank."""
        return self._mixing.last_mixed()

    def shared_state(self) -> dict[str, Tensor]:
        """Return the chosen edges."""
        return {} if self._edges is None else {"edges": torch.tensor(sorted(self._edges))}

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Load the edges, if the number of workers is the same."""
        self._mixing.load_state(saved, shared)
        size = self._context.group.size
        edges = [(int(a), int(b)) for a, b in shared["edges"].tolist()] if "edges" in shared else []
        if len(saved) == size and edges and max(map(max, edges)) < size:  # of workers of whom none is lost
            self._choose(edges)

    def close(self) -> None:
        """Close the connections."""
        self._mixing.close()
        self._group.close()

    def _choose_together(self, before: Tensor) -> int:
        """Measure, and let rank 0 choose for all; return the bytes sent."""
        group, model = self._context.group, self._flat.read()
        sketches = torch.zeros(group.size, _NUM_BUCKETS, dtype=torch.float64)
        group.on_cpu().all_gather(sketches, sketch(model, self._context.seed), name="sketches").wait()
        lengths = group.gather_documents(float((model - before).double().norm()), name="lengths of steps")
        num_bytes = self._rule.probe_bytes or min(model.nbytes, _MOST_PROBE_BYTES)
        seconds, probe_bytes = measure_links(self._group, self._candidates, num_bytes)
        everybody = group.gather_documents(seconds, name="times of links")
        edges = None
        if group.rank == 0:
            distance = float((sketches - sketches.mean(0)).square().sum(1).mean().sqrt())
            num_pairs = len(self._edges or self._rule.graph.find_edges(group.size)) // 2
            num_pairs = self._rule.choose_num_pairs(num_pairs, distance, float(np.sqrt(np.mean(np.square(lengths)))))
            table = np.array(everybody)
            edges = sorted(choose_edges(table + table.T, self._candidates, num_pairs))
        self._choose(group.gather_documents(edges, name="edges")[0])
        return probe_bytes + (group.size - 1) * sketches[0].nbytes

    def _choose(self, edges: Sequence[Sequence[int]]) -> None:
        self._edges = {(a, b) for a, b in edges}
        self._use(mix_over(self._edges, self._context.group.size))

    def _use(self, mixing: Floats) -> None:
        self._row = MixingRow.of(mixing, self._context.group.rank)


def sketch(model: Tensor, seed: int) -> Tensor:
    """Return a few numbers whose distances are about those of the models (count sketch, Charikar et al. 2002).

    Each element, with a random sign, is added to a random bucket; all workers draw the same with the same seed.
    """
    generator = torch.Generator().manual_seed(seed)
    buckets = torch.randint(_NUM_BUCKETS, (len(model),), generator=generator)
    signs = 2 * torch.randint(2, (len(model),), generator=generator, dtype=torch.int8) - 1
    return torch.zeros(_NUM_BUCKETS, dtype=torch.float64).index_add_(0, buckets, model.double() * signs)


def measure_links(group: Group, candidates: Edges, num_bytes: int) -> tuple[list[float], int]:
    """Return the seconds of a message on each link to a higher rank, 0 on others, and the bytes sent.

    Each rank measures one link at a time: in rounds in which every rank has one partner, or none.
    """
    seconds, sent_bytes = [0.0] * group.size, 0
    places = list(range(group.size + group.size % 2))  # with an odd number of ranks one has no partner
    message, nothing = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    for _ in range(len(places) - 1):
        partner = places[-1 - places.index(group.rank)]
        if (group.rank, partner) in candidates:
            _there_and_back(group, partner, nothing)  # now both are ready
            times = [_there_and_back(group, partner, message) for _ in range(_NUM_PROBES)]
            sent_bytes += _NUM_PROBES * num_bytes + 1
            if group.rank < partner:
                seconds[partner] = min(times) / 2
        places = [places[0], places[-1], *places[1:-1]]
    return seconds, sent_bytes


def _there_and_back(group: Group, partner: int, message: Tensor) -> float:
    """Send a message to a higher rank and get it back, or the reverse; return the seconds."""
    began_s = time.perf_counter()
    if group.rank < partner:
        group.send(message, partner, tag=0, name="probe").wait()
    group.receive(message, partner, tag=0, name="probe").wait()
    if group.rank > partner:
        group.send(message, partner, tag=0, name="probe").wait()
    return time.perf_counter() - began_s
