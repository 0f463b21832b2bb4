"""The outer optimizer of DiLoCo: SGD with momentum on the workers' mean difference from their common parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor


class OuterSGD:
    """Moves outer parameters against the mean difference, as torch.optim.SGD moves parameters against their gradient.

    v <- momentum * v + d; x <- x - learning_rate * (d + momentum * v) with Nesterov's momentum, - learning_rate * v
    without. As in torch and optax v begins as the first difference, so that with a learning rate of 0.7 and a
    Nesterov momentum of 0.9 the first step is 0.7 * (1 + 0.9) = 1.33 times the mean difference.

    Args:
        learning_rate: Learning rate; 1 without momentum ends at the workers' mean exactly.
        momentum: Momentum; 0 keeps no state.
        nesterov: Whether momentum is Nesterov's.
    """

    def __init__(self, learning_rate: float, momentum: float, nesterov: bool) -> None:
        self._learning_rate, self._momentum, self._nesterov = learning_rate, momentum, nesterov
        self._velocities: dict[str, Tensor] = {}

    def __call__(self, block: str, outer: Tensor, mean: Tensor) -> None:
        """Move the outer parameters of a block, in place; `mean` may be overwritten."""
        if self._momentum:
            velocity = self._velocities.get(block)
            velocity = torch.zeros_like(mean) if velocity is None else velocity.to(mean.device)
            self._velocities[block] = velocity
            velocity.mul_(self._momentum).add_(mean)
            mean = mean.add_(velocity, alpha=self._momentum) if self._nesterov else velocity
        outer.sub_(mean, alpha=self._learning_rate)

    def state(self) -> dict[str, Tensor]:
        """Return the velocity of each block: the same on all workers."""
        return {f"velocity/{block}": velocity for block, velocity in self._velocities.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state`."""
        prefix = "velocity/"
        self._velocities = {n.removeprefix(prefix): t.clone() for n, t in state.items() if n.startswith(prefix)}
