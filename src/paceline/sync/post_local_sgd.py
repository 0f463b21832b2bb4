"""Post-local SGD: synchronous at first, local later."""

from pydantic import Field

from paceline.registry import register
from paceline.sync.local_sgd import LocalSGD


@register("post_local_sgd")
class PostLocalSGD(LocalSGD):
    """Post-local SGD (Lin et al. 2020, arXiv:1808.07217): every_step for `synchronous_steps`, then local_sgd.

    At the beginning, when parameters move far, workers stay together; later, often from the first decay of the
    learning rate on, they step alone for a period, which generalises as well as small batches do. It is local_sgd
    with another default: without synchronous steps both are the same, and if they never end, it is every_step.
    Optimizer state is the same on all workers until then, and each worker's own from there.

    On the wire are all gradients at every synchronous step, without the codec, then one all-reduce of the parameters a
    period. Clipping bounds the mean gradient at first, then each worker's own.
    """

    synchronous_steps: int = Field(default=1000, ge=0)
    """Steps in which gradients are averaged, before workers step alone."""
