"""The optimizer's step: unscaled, clipped, and skipped where fp16 overflowed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from paceline.errors import GradientError, NonFiniteError, SettingsError
from paceline.memory.tracker import StateReader
from paceline.parallel.local import local
from paceline.parallel.model_shard import ModelShard
from paceline.replica.checks import Precision


@dataclass(frozen=True)
class OptimizerStepResult:
    """Result of an optimizer step."""

    gradient_norm: float | None
    """Global gradient norm before clipping; None without clipping."""
    skipped: bool
    """Whether fp16 overflowed and parameters stayed unchanged."""


def _is_guard(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), OptimizerStep)


class OptimizerStep:
    """Steps of an optimizer, with its loss scale and the bound on its gradients.

    Args:
        guarded: Optimizer that must be stepped by nothing else; None for no such check.
        precision: Precision of forward; fp16 scales the loss.
        clip_norm: Largest gradient norm; None for no bound.
        shard: Model shard of this rank.
        parameters: Parameters that are trained, by name.
    """

    def __init__(
        self,
        guarded: torch.optim.Optimizer | None,
        precision: Precision,
        clip_norm: float | None,
        shard: ModelShard,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self._is_stepping = False
        if guarded is not None and any(_is_guard(hook) for hook in guarded._optimizer_step_pre_hooks.values()):
            raise SettingsError(
                "an optimizer must belong to one Replica, but this one belongs to another that is open; call close() "
                "of that one first, or make a new optimizer"
            )
        self._guard = guarded.register_step_pre_hook(self._refuse_step) if guarded is not None else None
        self.clip_norm = clip_norm
        self._shard = shard
        self._parameters = parameters
        self._scaler = torch.amp.GradScaler(shard.world.device.type, enabled=precision == "fp16")
        # The scaler makes its scale with the first loss, which a rank without the last stage of a pipeline never has.
        self._scaler.scale(torch.zeros((), device=shard.world.device))

    @property
    def is_scaled(self) -> bool:
        """Whether losses are scaled."""
        return self._scaler.is_enabled()

    @property
    def loss_scale(self) -> float:
        """Factor by which losses are scaled."""
        return float(self._scaler.get_scale())

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, scaled."""
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def run(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        before: Callable[[bool], None],
        *,
        is_optimizer_run: bool = True,
        has_gradients: bool = True,
    ) -> OptimizerStepResult:
        """Unscale, clip, call `before`, and step.

        Args:
            optimizer: Optimizer to step.
            number: Number of updates before this step.
            before: Function called between clipping and the step, with a flag that says whether fp16 overflowed, if a
                server is to step.
            is_optimizer_run: Whether the optimizer steps here: not if a server does.
            has_gradients: Whether there are gradients.

        Raises:
            NonFiniteError: The gradient norm is not finite, in a precision that does not overflow.
        """
        if has_gradients:
            self._agree_on_overflow()
            self._scaler.unscale_(optimizer)
        gradient_norm = self.clip(optimizer, number) if self.clip_norm is not None else None
        before(self.is_scaled and not is_optimizer_run and has_gradients and self._is_overflown())
        scale = self._scaler.get_scale()
        if has_gradients:
            if is_optimizer_run:
                with self.stepping():
                    self._scaler.step(optimizer)
            self._scaler.update()
        return OptimizerStepResult(gradient_norm, self._scaler.get_scale() < scale)

    def close(self) -> None:
        """Let the optimizer be stepped by anybody again."""
        if self._guard is not None:
            self._guard.remove()

    def has_foreign_hooks(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step runs hooks of others than this object's, which may do anything at it."""
        own = self._guard.id if self._guard is not None else None
        # Torch has no public names for them.
        return bool(
            optimizer._optimizer_step_pre_hooks.keys() - {own}
            or any(not isinstance(hook, StateReader) for hook in optimizer._optimizer_step_post_hooks.values())
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )

    def _refuse_step(self, *_: object) -> None:
        if not self._is_stepping:
            raise GradientError(
                "optimizer.step() must be left to replica.update(), which calls it after the gradients of all workers "
                "have come; leave optimizer.step() and zero_grad() out of the loop"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale's state, as JSON."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state."""
        if state:
            self._scaler.load_state_dict(state)

    def _is_overflown(self) -> bool:
        gradients = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
        return not all(bool(gradient.isfinite().all()) for gradient in gradients)

    def _agree_on_overflow(self) -> None:
        """Share an overflow on one rank with all ranks of the worker, otherwise some would step and others not."""
        if not self.is_scaled or self._shard.model_parallel_group.size == 1:
            return
        gradients = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
        num_bad = torch.tensor([sum(not gradient.isfinite().all() for gradient in gradients)], dtype=torch.float64)
        num_bad = num_bad.to(self._shard.world.device)
        self._shard.sum_over_model_parallel(num_bad, "overflow")
        if num_bad:
            for gradient in gradients:
                gradient.fill_(torch.inf)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """While active, the optimizer may step."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def clip(self, optimizer: torch.optim.Optimizer, number: int, *, factor: float = 1.0) -> float:
        """Clip the gradients by their global norm, and return it.

        Args:
            optimizer: Optimizer of the gradients.
            number: Number of updates before this step.
            factor: Factor of the bound.

        Raises:
            NonFiniteError: The norm is not finite, in a precision that does not overflow.
        """
        assert self.clip_norm is not None
        bound = self.clip_norm * factor
        if self._shard.is_whole:
            held: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(held, bound)
        else:
            norm = self._shard.gradient_norm(self._parameters)
            gradients = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
            torch._foreach_mul_(gradients, float((bound / (norm + _TINY)).clamp(max=1.0)))
        if not torch.isfinite(norm) and not self.is_scaled:
            raise NonFiniteError(
                f"the gradient norm must be finite, but at step {number} it is {float(norm)} "
                "while the loss is finite; look at that step's data or lower the learning rate"
            )
        return float(norm)


_TINY = 1e-6
"""Number that torch adds to a norm before it divides by it."""


def autocast(precision: Precision, device: str) -> AbstractContextManager[Any]:
    """Return the context of forward on a type of device; with fp16 losses must be scaled."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)
