"""Local SGD: workers step alone, and average their parameters once in a period."""

from paceline.registry import register
from paceline.sync.periodic import LocalRule, PeriodicSynchroniser, SyncSchedule
from paceline.sync.synchroniser import Synchroniser, WorkerContext


@register("local_sgd")
class LocalSGD(LocalRule):
    """Local SGD (Stich 2019, arXiv:1805.09767), which with uneven shares is federated averaging (McMahan et al. 2017).

    After `period` steps x <- sum_i m_i x_i / sum_i m_i, where m_i is the weight of the samples that worker i has used
    since the last sync step; a worker that has used none takes the others' mean. Steps that fp16 skips count with their
    samples. With a period of 1 and SGD, also with momentum if weights do not change, it is every_step; with Adam it
    is not, whose second moments are each worker's own. Optimizer state stays with its worker. The first
    `synchronous_steps` are those of every_step, bit for bit. Adaptive optimizers step with a smaller beta1 and a larger
    rate than given (`local_beta1`, `scale_rate`), unlike the papers', which have SGD: it changes nothing of SGD.

    On the wire is one all-reduce of the parameters a period, 1 / `period` of the bytes of every_step. Clipping bounds
    each worker's own gradient. BatchNorm's statistics are pooled by second moments at each sync step. It differs from
    the papers in that differences are sent rather than parameters, so that codecs with error feedback work, and in that
    the same workers take part in every period.
    """

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser | None:
        """Return the synchroniser that averages; None for a worker alone."""
        if context.group.size == 1:
            return None
        return PeriodicSynchroniser(context, self, SyncSchedule(self.period, self.synchronous_steps))
