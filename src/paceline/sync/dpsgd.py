"""Decentralised SGD: workers step by their own gradients, and mix their parameters with neighbours in every step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from paceline.comm.group import Group
from paceline.errors import SettingsError
from paceline.registry import register
from paceline.sync.gossip import FlatParameters, GossipMessages, GossipRule, MixingRow, MixingRows
from paceline.sync.synchroniser import Abandoned, LocalStep, Synchroniser, SyncResult, WorkerContext
from paceline.topology.graphs import is_doubly_stochastic


@register("dpsgd")
class DPSGD(GossipRule):
    """Decentralised parallel SGD, x_i <- sum_j W_ij x_j - lr * g_i(x_i) (Lian et al. 2017, arXiv:1705.09056).

    W must be doubly stochastic: then the mean over workers moves by the mean gradient alone, and mixing preserves it.
    On a complete graph, whose weights are all 1 / n, mixing averages: workers differ by their last gradients only.
    Any optimizer can replace lr * g; its state stays with its worker.

    On the wire is one message of the parameters to each neighbour and step, for any number of workers; for a ring two.
    It travels while the next gradients are computed, which need only the worker's own parameters. Clipping bounds each
    worker's own gradient. The mean of the workers' models is evaluated and saved.
    It differs from the paper in that the graph may change from step to step.
    """

    def start_mixing(self, context: WorkerContext) -> Synchroniser:
        """Return the synchroniser that mixes.

        Raises:
            SettingsError: The graph does not exist for that number of workers, or does not preserve their mean.
        """
        check_keeps_mean(self, context.group)
        return DPSGDSynchroniser(context, MixingRows(self.graph, context.group).at)


def check_keeps_mean(rule: GossipRule, group: Group) -> None:
    """Refuse a graph whose mixing does not preserve the mean of the workers."""
    for step in range(rule.graph.num_phases(group.size) or 1):
        if not is_doubly_stochastic(rule.graph.mixing_matrix(group.size, step)):
            raise SettingsError(
                f"the rows and columns of the mixing matrix must sum to 1 with sync {rule.name}, or workers would "
                f"agree on a wrong mean, but those of graph {rule.graph.name} with {group.size} workers do not; "
                "take an undirected graph, or sync push_sum"
            )


class DPSGDSynchroniser(Synchroniser):
    """Mixes a worker's parameters with its neighbours'.

    A swap that is under way is not in a checkpoint: parameters do not change until it ends, so it is repeated.

    Args:
        context: The worker's model, optimizer and group.
        choose: Function that returns this worker's row of the mixing matrix of a step.
    """

    def __init__(self, context: WorkerContext, choose: Callable[[int], MixingRow]) -> None:
        self._context, self._choose = context, choose
        self._flat = FlatParameters(context.parameters)
        self._swap = GossipMessages(context.group, self._flat.num_elements, self._flat.dtype)
        self._row: MixingRow | None = None
        """Row of the swap under way."""
        self._mixed: dict[int, int] = {}

    def before_update(self, step: LocalStep) -> None:
        """Mix; the gradients are those of the parameters before."""
        row = self._row or self._start(step.number)
        models = self._swap.finish() | {self._context.group.rank: self._swap.outgoing}
        self._row = None
        self._flat.write(row.mix(models))
        self._mixed |= dict.fromkeys(row.weights, step.number)
        self._costs = self._swap.take_costs()

    def after_update(self, step: LocalStep) -> SyncResult:
        """Start to send the new parameters; the counted messages are those mixed in this step."""
        self._start(step.number + 1)
        return SyncResult(*self._costs)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the mean over workers."""
        with self._flat.averaged(self._context.group, self._flat.read()):
            yield

    def abandon(self) -> Abandoned:
        """Drop the swap: what was sent has changed nothing yet."""
        self._swap.abandon()
        self._row = None
        return Abandoned.DONE

    def repair(self, *, is_new: bool) -> str:
        """Let new workers begin at the mean of the others."""
        return self._flat.begin_at_mean(self._context.group, self._flat.read(), is_new=is_new)

    def last_mixed(self) -> Mapping[int, int]:
        """Return the number of updates of each neighbour's model when it was mixed in last, by rank."""
        return self._mixed

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Drop the swap of the former parameters."""
        self._swap.finish()
        self._row = None

    def close(self) -> None:
        """Close the connections."""
        self._swap.close()

    def _start(self, number: int) -> MixingRow:
        self._row = row = self._choose(number)
        self._flat.read(self._swap.outgoing)
        sources = [rank for rank in row.weights if rank != self._context.group.rank]
        self._swap.start(sources, row.destinations, f"gossip of step {number}")
        return row
