"""Hierarchical local SGD: every step inside a host, once in a period between hosts."""

from collections.abc import Sequence

from pydantic import Field
from torch import Size

from paceline.comm.group import Group
from paceline.comm.hosts import find_hosts
from paceline.registry import register
from paceline.sync.periodic import AveragingRule, PeriodicSynchroniser, SyncSchedule
from paceline.sync.rule import Traffic
from paceline.sync.synchroniser import Synchroniser, WorkerContext


@register("hierarchical_local_sgd")
class HierarchicalLocalSGD(AveragingRule):
    """Hierarchical local SGD (Lin et al. 2020, arXiv:1808.07217): every_step in a host, local_sgd between hosts.

    The workers of a host sum their gradients at every step, and so have the same parameters; after `period` steps all
    take the mean over hosts, by the weight of the samples that each has used. With one worker a host it is
    local_sgd, on one host every_step. On the wire are a host's gradients at every step inside it, without the codec,
    and one all-reduce of the parameters a period, of which groups that know their hosts send one worker's part between
    hosts.

    Clipping bounds the mean gradient of a host. BatchNorm's statistics are pooled by second moments at each sync step.
    The paper has block steps inside a host as well; here a host takes every step together.
    """

    host_size: int | None = Field(default=None, ge=1)
    """Number of workers of a host, in the order of ranks; by default those on one machine."""

    @property
    def meets_on_change(self) -> bool:
        """Always true: workers of a host must be equal, and may be of another host among other workers."""
        return True

    def reduce_ranks(self, group: Group, step: int) -> Sequence[int]:
        """Return the workers of this worker's host."""
        if self.host_size is None:
            return next(ranks for ranks in find_hosts(group) if group.rank in ranks)
        first = group.rank // self.host_size * self.host_size
        return range(first, min(first + self.host_size, group.size))

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser | None:
        """Return the synchroniser that averages over hosts; None for a worker alone."""
        if context.group.size == 1:
            return None
        return PeriodicSynchroniser(context, self, SyncSchedule(self.period))

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """One all-reduce a step inside a host (of all workers without `host_size`); one a period of all."""
        num_bytes = 4 * sum(shape.numel() for shape in shapes)
        num_neighbours = min(self.host_size or num_workers, num_workers)
        inside = Traffic(
            "all_reduce", num_bytes, round(2 * (num_neighbours - 1) / num_neighbours * num_bytes), peers="host"
        )
        between = super().traffic(shapes, num_workers)
        return (inside, *between) if num_neighbours > 1 else between
