"""DiLoCo: workers step alone, and an outer optimizer steps along their mean difference."""

from typing import Self

from pydantic import Field

from paceline.registry import register
from paceline.sync.outer_sgd import OuterSGD
from paceline.sync.periodic import LocalRule, PeriodicSynchroniser, SyncSchedule
from paceline.sync.synchroniser import Synchroniser, WorkerContext

_WARMUP_ROUNDS = 25
"""Most rounds over which the outer momentum rises."""


@register("diloco")
class DiLoCo(LocalRule):
    """Distributed low-communication training (Douillard et al. 2023, arXiv:2311.08105).

    After `period` steps of each worker's own optimizer (AdamW in the paper) the outer gradient is the mean of x_before
    - x_i over workers, by the weight of the samples that each has used, and SGD with Nesterov momentum steps along it
    from x_before; all workers continue from the result. With an outer learning rate of 1 and no momentum it is
    local_sgd. The first `synchronous_steps` are those of every_step: the paper starts from a model that was trained
    like that for 24,000 of 88,000 steps. The outer momentum is the same on all workers, and is in the checkpoint.

    Outer momentum rises linearly over the first rounds, unlike the paper's, which starts from a trained model: from
    random weights full momentum from the first round on ended 40 % above synchronous training, with the rise 5 % (a
    small Transformer, momentum 0.9; docs/benchmarks). A constant mean difference leads to steps of 3.5 times it in the
    end, 7 times with the paper's momentum. Of Adam and its kin beta1 is bounded by `local_beta1` while workers step
    alone.

    On the wire is one all-reduce of the parameters a period, 1 / `period` of the bytes of every_step; the paper's
    period is 500. Clipping bounds each worker's own gradient, not the outer one. Optimizer state stays with its worker;
    BatchNorm's statistics are pooled by second moments at each sync step. The paper weighs workers equally.
    """

    period: int = Field(default=16, ge=1)
    """Steps from one exchange to the next. A run should have at least 25 rounds."""
    outer_learning_rate: float = Field(default=0.7, gt=0)
    """Learning rate of the outer optimizer."""
    outer_momentum: float = Field(default=0.8, ge=0, lt=1)
    """Momentum of the outer optimizer; 0 keeps no state. The paper's is 0.9."""
    outer_momentum_warmup: int | None = Field(default=None, ge=0)
    """Rounds over which the outer momentum rises linearly from 0 to `outer_momentum`, of each fragment by itself; by
    default a third of the run's rounds and at most 25, in a loop of your own 25; 0 for none. A run that resumes, be it
    longer, goes on with its own, unless another is given."""
    nesterov: bool = True
    """Whether the outer momentum is Nesterov's."""
    scale_rate: bool = False
    """Whether learning rates of adaptive optimizers are multiplied by the fourth root of the number of workers while
    each steps alone; the outer momentum makes steps larger already."""

    def fit_length(self, num_steps: int) -> Self:
        """Return the rule with the warm-up of a run of `num_steps`."""
        if self.outer_momentum_warmup is not None:
            return self
        num_rounds = max(num_steps - self.synchronous_steps, 0) // self.period
        fitted = self.model_copy(update={"outer_momentum_warmup": min(_WARMUP_ROUNDS, num_rounds // 3)})
        fitted.model_fields_set.discard("outer_momentum_warmup")  # nobody has given it: a checkpoint's goes before it
        return fitted

    def start_outer(self) -> OuterSGD:
        """Return the outer optimizer."""
        warmup = _WARMUP_ROUNDS if self.outer_momentum_warmup is None else self.outer_momentum_warmup
        is_given = self.outer_momentum_warmup is not None and "outer_momentum_warmup" in self.model_fields_set
        return OuterSGD(self.outer_learning_rate, self.outer_momentum, self.nesterov, warmup, keeps_warmup=is_given)

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser:
        """Return the synchroniser that takes the outer steps."""
        schedule = SyncSchedule(self.period, self.synchronous_steps)
        return PeriodicSynchroniser(context, self, schedule, self.start_outer())
