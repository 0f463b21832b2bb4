"""DiLoCo: workers step alone, and an outer optimizer steps along their mean difference."""

from pydantic import Field

from paceline.registry import register
from paceline.sync.outer_sgd import OuterSGD
from paceline.sync.periodic import LocalRule, PeriodicSynchroniser, SyncSchedule
from paceline.sync.synchroniser import Synchroniser, WorkerContext


@register("diloco")
class DiLoCo(LocalRule):
    """Distributed low-communication training (Douillard et al. 2023, arXiv:2311.08105).

    After `period` steps of each worker's own optimizer (AdamW in the paper) the outer gradient is the mean of x_before
    - x_i over workers, by the weight of the samples that each has used, and SGD with Nesterov momentum steps along it
    from x_before; all workers continue from the result. With an outer learning rate of 1 and no momentum it is
    local_sgd. The first `synchronous_steps` are those of every_step: the paper starts from a model that was trained
    like that for 24,000 of 88,000 steps. The outer momentum is the same on all workers, and is in the checkpoint.

    Momentum begins like torch's and optax's: the first outer step is 1 + `outer_momentum` times the learning rate,
    by default 1.33 times the mean difference, and a constant one leads to 7 times it.

    On the wire is one all-reduce of the parameters a period, 1 / `period` of the bytes of every_step; the paper's
    period is 500. Clipping bounds each worker's own gradient, not the outer one. Optimizer state stays with its worker;
    BatchNorm's statistics are pooled by second moments at each sync step. The paper weighs workers equally.
    """

    period: int = Field(default=50, ge=1)
    """Steps from one exchange to the next."""
    outer_learning_rate: float = Field(default=0.7, gt=0)
    """Learning rate of the outer optimizer."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of the outer optimizer; 0 keeps no state."""
    nesterov: bool = True
    """Whether the outer momentum is Nesterov's."""

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser:
        """Return the synchroniser that takes the outer steps."""
        outer = OuterSGD(self.outer_learning_rate, self.outer_momentum, self.nesterov)
        return PeriodicSynchroniser(context, self, SyncSchedule(self.period, self.synchronous_steps), outer)
