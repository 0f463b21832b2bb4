"""The outer optimizer of DiLoCo: SGD with momentum on the workers' mean difference from their common parameters."""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

_WARMUP = "outer_momentum_warmup"
"""Name of the warm-up in the state."""


class OuterSGD:
    """Moves outer parameters against the mean difference, as torch.optim.SGD moves parameters against their gradient.

    v <- momentum * v + d; x <- x - learning_rate * (d + momentum * v) with Nesterov's momentum, - learning_rate * v
    without. As in torch and optax v begins as the first difference. Each block's momentum rises from 0 to its full
    value over its first `warmup_rounds` steps.

    Args:
        learning_rate: Learning rate; 1 without momentum ends at the workers' mean exactly.
        momentum: Momentum; 0 keeps no state.
        nesterov: Whether momentum is Nesterov's.
        warmup_rounds: Steps over which momentum rises linearly; 0 begins with all of it.
        keeps_warmup: Whether `warmup_rounds` also replaces that of a loaded state; else the state's own goes on.
    """

    def __init__(
        self,
        learning_rate: float,
        momentum: float,
        nesterov: bool,
        warmup_rounds: int = 0,
        *,
        keeps_warmup: bool = False,
    ) -> None:
        self._learning_rate, self._momentum, self._nesterov = learning_rate, momentum, nesterov
        self._warmup_rounds, self._keeps_warmup = warmup_rounds, keeps_warmup
        self._velocities: dict[str, Tensor] = {}
        self._num_rounds: dict[str, int] = {}

    def __call__(self, block: str, outer: Tensor, mean: Tensor) -> None:
        """Move the outer parameters of a block, in place; `mean` may be overwritten."""
        if self._momentum:
            velocity = self._velocities.get(block)
            velocity = torch.zeros_like(mean) if velocity is None else velocity.to(mean.device)
            self._velocities[block] = velocity
            momentum = self._momentum * self._rise(block)
            velocity.mul_(momentum).add_(mean)
            mean = mean.add_(velocity, alpha=momentum) if self._nesterov else velocity
        outer.sub_(mean, alpha=self._learning_rate)

    def state(self) -> dict[str, Tensor]:
        """Return the velocity of each block, the number of its steps, and the warm-up: the same on all workers."""
        if not self._momentum:
            return {}
        velocities = {f"velocity/{block}": velocity for block, velocity in self._velocities.items()}
        rounds = {f"rounds/{block}": torch.tensor(number) for block, number in self._num_rounds.items()}
        return velocities | rounds | {_WARMUP: torch.tensor(self._warmup_rounds)}

    def load_state(self, state: Mapping[str, Tensor], *, warns: bool) -> None:
        """Load the result of `state`; one without numbers of steps was saved where momentum did not rise.

        Args:
            state: The state.
            warns: Whether to warn of a warm-up that is not the state's.
        """
        saved = int(state.get(_WARMUP, self._warmup_rounds))
        if not self._keeps_warmup:
            self._warmup_rounds = saved
        elif warns and saved != self._warmup_rounds and self._momentum:
            warnings.warn(
                f"the outer momentum rises over {self._warmup_rounds} rounds from here on, but over {saved} before the "
                f"checkpoint; give outer_momentum_warmup {saved} to go on as before",
                stacklevel=3,
            )
        prefix = "velocity/"
        self._velocities = {n.removeprefix(prefix): t.clone() for n, t in state.items() if n.startswith(prefix)}
        self._num_rounds = {block: int(state.get(f"rounds/{block}", self._warmup_rounds)) for block in self._velocities}

    def _rise(self, block: str) -> float:
        """Return the share of the momentum that a block's step has, and count the step."""
        number = self._num_rounds.get(block, 0)
        self._num_rounds[block] = number + 1
        return min(1.0, number / self._warmup_rounds) if self._warmup_rounds else 1.0
