"""Push-sum: decentralised SGD over directed graphs; each model is a numerator that is sent with its weight."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Size, Tensor

from paceline.registry import register
from paceline.sync.gossip import FlatParameters, GossipMessages, GossipRule, MixingRow, MixingRows
from paceline.sync.synchroniser import Abandoned, LocalStep, Synchroniser, SyncResult, WorkerContext
from paceline.topology.graphs import Graph, OnePeerExponentialGraph

_WEIGHT_BYTES = 8
"""Bytes of the weight, in float64, at the beginning of a message."""


@register("push_sum")
class PushSum(GossipRule):
    """Stochastic gradient push (Assran et al. 2019, arXiv:1811.10792).

    Workers keep a numerator x and a weight w, 1 at first, and mix both:
    x_i <- sum_j P_ij x_j - lr * g_i(x_i / w_i)
    and w_i <- sum_j P_ij w_j. Only the columns of P must sum to 1, so a worker need not receive from those that it
    sends to. If rows do too all weights stay 1, and it is dpsgd on the same graph. The model is x / w in forward, and
    the sum of numerators divided by that of weights for evaluation and checkpoints.

    On the wire is one message of the parameters and 8 bytes to each neighbour and step, while the next gradients are
    computed. Clipping bounds each worker's own gradient. It differs from the paper in that mixing comes before the step
    of the optimizer and not after it; the optimizer steps the numerator, so that decay of parameters shrinks the mean
    by as much as it would shrink one model.
    """

    graph: Graph = OnePeerExponentialGraph()
    """Graph of destinations, which may be directed."""

    def start_mixing(self, context: WorkerContext) -> Synchroniser:
        """Return the synchroniser that mixes.

        Raises:
            SettingsError: The graph does not exist for that number of workers.
        """
        self.graph.mixing_matrix(context.group.size)
        return PushSumSynchroniser(context, self.graph)

    def message_bytes(self, shapes: Sequence[Size]) -> int:
        """Return the size of the parameters and the weight."""
        return super().message_bytes(shapes) + _WEIGHT_BYTES


class PushSumSynchroniser(Synchroniser):
    """Mixes a worker's numerator and weight with those of its neighbours. Between steps parameters are their quotient.

    A swap that is under way is not in a checkpoint: its message does not change until it ends, so it is
    sent again.

    Args:
        context: The worker's model, optimizer and group.
        graph: Graph of destinations.
    """

    def __init__(self, context: WorkerContext, graph: Graph) -> None:
        self._context = context
        self._rows = MixingRows(graph, context.group)
        self._flat = FlatParameters(context.parameters)
        num_bytes = _WEIGHT_BYTES + self._flat.num_elements * self._flat.dtype.itemsize
        self._swap = GossipMessages(context.group, num_bytes, torch.uint8)
        self._weight, self._numerator = self._parts(self._swap.outgoing)
        self._has_begun = False
        self._row: MixingRow | None = None
        """Row of the swap under way."""
        self._mixed: dict[int, int] = {}

    def before_update(self, step: LocalStep) -> None:
        """Mix, and give the numerator to the optimizer; the gradients are those of the quotient before."""
        self._begin()
        row = self._row or self._start(step.number)
        models = self._swap.finish() | {self._context.group.rank: self._swap.outgoing}
        self._row = None
        parts = {rank: self._parts(model) for rank, model in models.items()}
        mixed = row.mix({rank: numerator for rank, (_, numerator) in parts.items()})
        self._weight.copy_(row.mix({rank: weight for rank, (weight, _) in parts.items()}))
        self._flat.write(mixed)
        self._mixed |= dict.fromkeys(row.weights, step.number)
        self._costs = self._swap.take_costs()

    def after_update(self, step: LocalStep) -> SyncResult:
        """Set parameters to the quotient again, and start to send; the messages mixed in this step are counted."""
        self._flat.read(self._numerator)
        self._flat.write(self._numerator / float(self._weight))
        self._start(step.number + 1)
        return SyncResult(*self._costs)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the sum of numerators divided by that of weights."""
        self._begin()
        with self._flat.averaged(self._context.group, self._numerator, float(self._weight)):
            yield

    def abandon(self) -> Abandoned:
        """Drop the swap: a worker keeps its numerator and its weight until it mixes."""
        self._swap.abandon()
        self._row = None
        return Abandoned.DONE

    def repair(self, *, is_new: bool) -> str:
        """Let new workers begin at the mean of the others, with weight 1."""
        self._begin()
        words = self._flat.begin_at_mean(self._context.group, self._numerator, float(self._weight), is_new=is_new)
        if is_new:
            self._has_begun = False
            self._begin()
        return words

    def last_mixed(self) -> Mapping[int, int]:
        """Return the number of updates of each neighbour's model when it was mixed in last, by rank."""
        return self._mixed

    def state(self) -> dict[str, Tensor]:
        """Return numerator and weight."""
        self._begin()
        return {"numerator": self._numerator.clone(), "weight": self._weight.clone()}

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Load both; with another number of workers all begin from the consensus with weight 1."""
        self._swap.finish()
        self._row, self._has_begun = None, False
        self._begin()
        mine = saved[self._context.group.rank] if len(saved) == self._context.group.size else {}
        if mine:  # not if this worker was alone, without the rule
            self._numerator.copy_(mine["numerator"])
            self._weight.copy_(mine["weight"])

    def close(self) -> None:
        """Close the connections."""
        self._swap.close()

    def _begin(self) -> None:
        """Take the present parameters as numerators, with weight 1, before the first use."""
        if not self._has_begun:
            self._flat.read(self._numerator)
            self._weight.fill_(1)
        self._has_begun = True

    def _start(self, number: int) -> MixingRow:
        self._row = row = self._rows.at(number)
        sources = [rank for rank in row.weights if rank != self._context.group.rank]
        self._swap.start(sources, row.destinations, f"push of step {number}")
        return row

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight and numerator of a message, as views."""
        return message[:_WEIGHT_BYTES].view(torch.float64), message[_WEIGHT_BYTES:].view(self._flat.dtype)
