"""Common parts of rules whose workers mix their models with neighbours: a graph, messages, and the mean of all."""

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Self

import torch
from torch import Size, Tensor

from paceline.comm.group import Group, Work
from paceline.errors import SettingsError
from paceline.sync.rule import Rule, Traffic
from paceline.sync.synchroniser import Synchroniser, WorkerContext
from paceline.topology.graphs import Floats, Graph, RingGraph


class GossipRule(Rule):
    """Settings of a rule whose workers step by their own gradients, and mix parameters with neighbours.

    The graph decides a worker's weight in the mean of all, not its number of samples; samples are weighted within a
    worker's step only. Clipping bounds each worker's own gradient. BatchNorm's statistics stay
    with their worker, and are pooled for evaluation. Mixing runs in host memory, on GPUs too.
    """

    graph: Graph = RingGraph()
    """Graph of neighbours."""

    @property
    def keeps_replicas_equal(self) -> bool:
        """Always false: neighbours are close to each other, not equal."""
        return False

    @property
    def weighs_samples(self) -> bool:
        """Always false: the graph decides."""
        return False

    @property
    def survives_loss(self) -> bool:
        """Whether workers step together: then each keeps its own model, on a graph of those that are left."""
        return not self.is_asynchronous

    def fit_workers(self, num_workers: int) -> Self:
        """Return the rule with a ring, if its own graph does not exist for that number of workers."""
        try:
            self.graph.mixing_matrix(num_workers)
        except SettingsError:
            return self.model_copy(update={"graph": RingGraph()})
        return self

    def reduce_ranks(self, group: Group, step: int) -> Sequence[int]:
        """Return this worker alone, which steps by its own gradient."""
        return [group.rank]

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser | None:
        """Return the synchroniser that mixes; None for a worker alone.

        Raises:
            SettingsError: The graph does not exist for that number of workers, or does not suit the rule.
        """
        if context.group.size == 1:
            return None
        return self.start_mixing(context)

    @abstractmethod
    def start_mixing(self, context: WorkerContext) -> Synchroniser:
        """Return the synchroniser that mixes, among two workers or more."""

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """A message to each neighbour in every step; the mean over workers if their numbers differ."""
        num_bytes = 4 * sum(shape.numel() for shape in shapes)
        num_messages = count_messages(self.graph, num_workers)
        wire_bytes = round(num_messages * self.message_bytes(shapes))
        return (Traffic("send", num_bytes, wire_bytes, peers="neighbours", overlap=1.0),)

    def message_bytes(self, shapes: Sequence[Size]) -> int:
        """Return the size of one message, of parameters of those shapes in fp32."""
        return 4 * sum(shape.numel() for shape in shapes)


def count_messages(graph: Graph, num_workers: int) -> float:
    """Return the number of messages of a worker in a step, on average."""
    num_phases = graph.num_phases(num_workers) or 1
    counts = [len(graph.find_edges(num_workers, step)) for step in range(num_phases)]
    return sum(counts) / num_phases / num_workers


@dataclass(frozen=True)
class MixingRow:
    """One worker's row of the mixing matrix in a step.

    Args:
        weights: Weight of each model in the new one, by rank, including this worker's.
        destinations: Ranks that get this worker's model.
    """

    weights: Mapping[int, float]
    destinations: Sequence[int]

    @classmethod
    def of(cls, mixing: Floats, rank: int) -> "MixingRow":
        """Return the row of `rank` in a mixing matrix."""
        weights = {source: weight for source, weight in enumerate(mixing[rank].tolist()) if weight or source == rank}
        destinations = [other for other, weight in enumerate(mixing[:, rank].tolist()) if weight and other != rank]
        return cls(weights, destinations)

    def mix(self, models: Mapping[int, Tensor]) -> Tensor:
        """Return the weighted sum, in the order of ranks: workers with the same weights get the same bits."""
        mixed = torch.zeros_like(next(iter(models.values())))
        for rank, weight in sorted(self.weights.items()):
            mixed.add_(models[rank], alpha=weight)
        return mixed


class MixingRows:
    """This worker's row in each step of a graph's mixing.

    Args:
        graph: Graph of neighbours.
        group: Group of the workers.
    """

    def __init__(self, graph: Graph, group: Group) -> None:
        self._graph, self._rank, self._size = graph, group.rank, group.size
        self._num_phases = graph.num_phases(group.size)
        self._known: dict[int, MixingRow] = {}

    def at(self, step: int) -> MixingRow:
        """Return the row of a step."""
        if self._num_phases is None:
            return self._make(step)
        phase = step % self._num_phases
        if phase not in self._known:
            self._known[phase] = self._make(phase)
        return self._known[phase]

    def _make(self, step: int) -> MixingRow:
        return MixingRow.of(self._graph.mixing_matrix(self._size, step), self._rank)


class FlatParameters:
    """Parameters in one flat buffer, of a dtype that can represent all of them.

    Buffers are in host memory, which messages need: parameters on a GPU are copied there and back.

    Args:
        parameters: Parameters by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = list(parameters.values())
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self.num_elements = sum(self._sizes)
        self.dtype = reduce(torch.promote_types, (parameter.dtype for parameter in self._parameters))

    def read(self, buffer: Tensor | None = None) -> Tensor:
        """Fill a buffer, or a new one, with the parameters and return it."""
        if buffer is None:
            buffer = torch.empty(self.num_elements, dtype=self.dtype)
        for part, parameter in zip(buffer.split(self._sizes), self._parameters, strict=True):
            part.copy_(parameter.detach().reshape(-1))
        return buffer

    @torch.no_grad()
    def write(self, buffer: Tensor) -> None:
        """Fill the parameters from a buffer."""
        for part, parameter in zip(buffer.split(self._sizes), self._parameters, strict=True):
            parameter.copy_(part.view(parameter.shape))

    @contextmanager
    def averaged(self, group: Group, numerator: Tensor, weight: float = 1.0) -> Iterator[None]:
        """While active, parameters are the sum of numerators divided by that of weights; afterwards, their own again.

        The cost is one all-reduce of their size. Every worker enters it.
        """
        own = [parameter.detach().clone() for parameter in self._parameters]
        total = numerator.to(torch.promote_types(self.dtype, torch.float32), copy=True)
        weights = torch.tensor([weight], dtype=torch.float64)
        group = group.on_cpu()
        works = [group.all_reduce(total, name="mean of workers"), group.all_reduce(weights, name="weight of workers")]
        for work in works:
            work.wait()
        self.write(total / float(weights))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self._parameters, own, strict=True):
                    parameter.copy_(value)

    def begin_at_mean(self, group: Group, numerator: Tensor, weight: float = 1.0, *, is_new: bool) -> str:
        """Fill the parameters of new workers with the mean of the others, so that they do not move it.

        Args:
            group: Group of all workers, each of which calls it.
            numerator: This worker's numerator.
            weight: This worker's weight.
            is_new: Whether this worker is new.

        Returns:
            Words on what was done; empty if no worker is new.
        """
        if not any(group.gather_documents(is_new, name="new workers")):
            return ""
        group = group.on_cpu()
        total = numerator.to(torch.promote_types(self.dtype, torch.float32), copy=True).mul_(not is_new)
        weights = torch.tensor([0.0 if is_new else weight], dtype=torch.float64)
        works = [group.all_reduce(total, name="mean of workers"), group.all_reduce(weights, name="weight of workers")]
        for work in works:
            work.wait()
        if is_new:
            self.write(total / float(weights))
        return "new workers begin at the mean of the others"


class GossipMessages:
    """Messages of one size to and from some workers, over separate connections.

    All receives are posted first, so no order among workers is needed. The buffers are reused by every swap:
    one for the outgoing message and one for each worker that has ever sent one.

    Args:
        group: Group of all workers.
        num_elements: Number of elements of a message.
        dtype: Dtype of a message.
    """

    def __init__(self, group: Group, num_elements: int, dtype: torch.dtype) -> None:
        self._group = group.on_cpu().duplicate("gossip")
        self.outgoing = torch.zeros(num_elements, dtype=dtype)
        """Message to send; leave it alone while a swap is under way."""
        self._incoming: dict[int, Tensor] = {}
        self._works: list[Work] = []
        self._wire_bytes = 0
        self._waited_s = 0.0

    def start(self, sources: Sequence[int], destinations: Sequence[int], name: str) -> None:
        """Start to send `outgoing`, and to receive a message from each source."""
        assert not self._works, "one swap must end before the next begins"
        for source in sources:
            buffer = self._incoming.setdefault(source, torch.empty_like(self.outgoing))
            self._works.append(self._group.receive(buffer, source, tag=0, name=name))
        self._works += [self._group.send(self.outgoing, other, tag=0, name=name) for other in destinations]
        self._wire_bytes += len(destinations) * self.outgoing.nbytes

    def finish(self) -> dict[int, Tensor]:
        """Wait for all messages, and return the received ones, by rank."""
        began_s = time.perf_counter()
        for work in self._works:
            work.wait()
        self._works = []
        self._waited_s += time.perf_counter() - began_s
        return self._incoming

    def abandon(self) -> None:
        """Drop the messages under way, whose senders or receivers are lost."""
        self._works = []

    def take_costs(self) -> tuple[float, int]:
        """Return the seconds waited and the bytes sent since the last call."""
        costs = self._waited_s, self._wire_bytes
        self._waited_s, self._wire_bytes = 0.0, 0
        return costs

    def close(self) -> None:
        """Wait for the messages under way, which the others wait for too, and close the connections."""
        self.finish()
        self._group.close()
