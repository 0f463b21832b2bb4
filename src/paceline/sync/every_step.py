"""Synchronous SGD: every gradient is averaged over all workers at every step."""

from torch import Tensor

from paceline.comm.group import Group, Work
from paceline.registry import register
from paceline.sync.rule import Rule, Traffic


@register("every_step")
class EveryStep(Rule):
    """Synchronous data-parallel SGD, x <- x - lr * sum_i w_i g_i / sum_i w_i.

    It equals one process on the same global batch up to the order of summation. On the wire: one native all-reduce
    of the gradients a step, 2(n-1)/n bytes a rank for each byte of gradient where the backend runs a ring. Gradients
    are clipped after they are averaged, so clipping is that of the one process too.
    """

    @property
    def keeps_replicas_equal(self) -> bool:
        """Always."""
        return True

    def exchange(self, numerators: Tensor, group: Group, *, name: str) -> Work:
        """Sum over all workers."""
        return group.all_reduce(numerators, name=name)

    def land(self, numerators: Tensor, mass: float) -> None:
        """Divide by the mass; a mass of exactly 1 costs no pass over the buffer."""
        if mass != 1.0:
            numerators.div_(mass)

    def traffic(self, num_params: int, bytes_per_param: int = 4) -> Traffic:
        """One all-reduce a step."""
        return Traffic("all_reduce", num_params * bytes_per_param, period=1)
