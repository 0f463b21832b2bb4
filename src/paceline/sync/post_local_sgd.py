"""Post-local SGD: synchronous at first, local later."""

from collections.abc import Sequence

from pydantic import Field

from paceline.comm.group import Group
from paceline.registry import register
from paceline.sync.periodic import Calendar, PeriodicRule, PeriodicSynchroniser
from paceline.sync.synchroniser import Site, Synchroniser


@register("post_local_sgd")
class PostLocalSGD(PeriodicRule):
    """Post-local SGD (Lin et al. 2020, arXiv:1808.07217): every_step until `start`, then local_sgd.

    At the beginning, when parameters move far, workers stay together; later, often from the first decay of the
    learning rate on, they step alone for a period, which generalises as well as small batches do. With `start` 0 it is
    local_sgd; if it is never reached, every_step. Optimizer state is the same on all workers up to `start`, and each
    worker's own from there.

    On the wire are all gradients at every step until `start`, without the codec, then one all-reduce of the
    parameters a period; `traffic` tells of the latter. Clipping bounds the mean gradient until `start`, then each
    worker's own.
    """

    start: int = Field(default=1000, ge=0)
    """The step in which workers begin to step alone."""

    def near(self, group: Group, step: int) -> Sequence[int]:
        """Return all workers until `start`, then the worker itself."""
        return range(group.size) if step < self.start else [group.rank]

    def start_synchroniser(self, site: Site) -> Synchroniser | None:
        """Return what averages from `start` on; a worker alone has nobody to meet."""
        if site.group.size == 1:
            return None
        return PeriodicSynchroniser(site, self, Calendar(self.period, self.start))
