"""The optimizer's step: unscaled, clipped, and skipped where fp16 overflowed."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from paceline.comm.progress import PROGRESS
from paceline.errors import GradientError, NonFiniteError, SettingsError
from paceline.memory.tracker import StateReader
from paceline.parallel.local import local
from paceline.parallel.model_shard import ModelShard
from paceline.parallel.parameter_changes import optimizing
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


def release_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer be given to a new replica, where the making of one before has failed half-way."""
    hooks = optimizer._optimizer_step_pre_hooks
    for number in [number for number, hook in hooks.items() if _is_guard(hook)]:
        del hooks[number]


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
        self.judge: Callable[[str, float], None] | None = None
        """Judge of the gradient norm before the step; see `GradientReduction.judge`."""
        self._shard = shard
        self._parameters = parameters
        self._scale = LossScale() if precision == "fp16" else None

    @property
    def is_scaled(self) -> bool:
        """Whether losses are scaled."""
        return self._scale is not None

    @property
    def loss_scale(self) -> float:
        """Factor by which losses are scaled."""
        return self._scale.value if self._scale is not None else 1.0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, scaled."""
        return loss if self._scale is None else loss * self._scale.value

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
        PROGRESS.enter(time.monotonic(), b"update")
        overflow = self._unscale() if self._scale is not None and has_gradients else None
        norm = self._clip(optimizer, self.clip_norm) if self.clip_norm is not None else None
        # Both are read at once: each read on a GPU waits for all that was queued.
        read = [value.double().reshape(()) for value in (overflow, norm) if value is not None]
        values = torch.stack(read).tolist() if len(read) > 1 else [float(value) for value in read]
        is_overflown = overflow is not None and values[0] > 0
        if norm is not None:
            self._check_norm(values[-1], number)
            if self.judge is not None and not is_overflown:
                self.judge("gradient norm", values[-1])
        before(is_overflown and not is_optimizer_run)
        if has_gradients:
            if is_optimizer_run and not is_overflown:
                is_plain = self._shard.is_whole or self.has_foreign_hooks(optimizer)
                quick = nullcontext() if is_plain else optimizing()
                with self.stepping(), quick:
                    optimizer.step()
            if self._scale is not None:
                self._scale.update(is_overflown=is_overflown)
        return OptimizerStepResult(values[-1] if norm is not None else None, is_overflown)

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
        return self._scale.state_dict() if self._scale is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state."""
        if state and self._scale is not None:
            self._scale.load_state_dict(state)

    def _unscale(self) -> torch.Tensor:
        """Divide the gradients by the loss scale; return a number above 0 if one overflowed on a rank of the worker."""
        assert self._scale is not None
        device = self._shard.world.device
        overflow = torch.zeros(1, device=device)
        inverse = torch.full((1,), 1 / self._scale.value, device=device)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                by_dtype.setdefault(parameter.grad.dtype, []).append(local(parameter.grad))
        if torch.float16 in by_dtype:
            raise SettingsError(
                "parameters must be fp32 or bf16 with precision fp16, whose gradients are scaled, but some are fp16; "
                "leave the module in fp32: forward runs under autocast"
            )
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
        self._shard.sum_over_model_parallel(overflow, "overflow")
        return overflow

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
        norm = float(self._clip(optimizer, self.clip_norm * factor))
        self._check_norm(norm, number)
        return norm

    def _clip(self, optimizer: torch.optim.Optimizer, bound: float) -> torch.Tensor:
        """Clip the gradients by their global norm, and return it, 0-dim, without waiting for it."""
        if self._shard.is_whole:
            held: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
            return torch.nn.utils.clip_grad_norm_(held, bound)
        norm = self._shard.gradient_norm(self._parameters)
        factor = (bound / (norm + _TINY)).clamp(max=1.0)
        gradients = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, float(factor) if norm.device.type == "cpu" else factor)
        return norm

    def _check_norm(self, norm: float, number: int) -> None:
        if not math.isfinite(norm) and not self.is_scaled:
            raise NonFiniteError(
                f"the gradient norm must be finite, but at step {number} it is {norm} "
                "while the loss is finite; look at that step's data or lower the learning rate"
            )


class LossScale:
    """Scale of fp16's loss, on the host: halved at each overflow, doubled after a run of steps without one.

    The rule and its state are those of `torch.amp.GradScaler`, which keeps the scale on the device and reads it back.
    """

    growth_factor, backoff_factor, growth_interval = 2.0, 0.5, 2000

    def __init__(self) -> None:
        self.value = 2.0**16
        self._num_good = 0

    def update(self, *, is_overflown: bool) -> None:
        """Adapt the scale after a step."""
        if is_overflown:
            self.value, self._num_good = self.value * self.backoff_factor, 0
            return
        self._num_good += 1
        if self._num_good == self.growth_interval:
            grown = self.value * self.growth_factor
            self.value, self._num_good = grown if grown <= _LARGEST_SCALE else self.value, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON."""
        return {"scale": self.value, "_growth_tracker": self._num_good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""
        self.value, self._num_good = float(state["scale"]), int(state["_growth_tracker"])


_LARGEST_SCALE = torch.finfo(torch.float32).max
_TINY = 1e-6
"""Number that torch adds to a norm before it divides by it."""


def autocast(precision: Precision, device: str) -> AbstractContextManager[Any]:
    """Return the context of forward on a type of device; with fp16 losses must be scaled."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)
