"""Asynchronous SGD: a server steps with each gradient, or with the mean of several, on arrival."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from paceline.errors import SettingsError
from paceline.registry import register
from paceline.sync.parameter_server.base import ServedRule
from paceline.sync.parameter_server.clocks import FreeClocks
from paceline.sync.parameter_server.shard import Push, ServerUpdate, Shard


@register("asgd")
class ASGD(ServedRule):
    """Asynchronous SGD (Dean et al. 2012, Downpour): no worker waits, and gradients are those of older parameters.

    Each worker pushes the mean gradient of its samples; the servers' optimizer, one for all workers, takes a step with
    it at once, and the worker pulls the new parameters. The delay of a push is the number of updates
    between its pull and it. With one worker it is SGD. Wire: a push and a pull of all parameters a step.

    A push counts as one step whatever its weight, so that n workers make n steps where synchronous SGD makes one,
    unless `pushes_per_step` says otherwise; pushes without samples change nothing. Each worker clips its own gradient
    before it pushes. Weight decay and momentum are the servers'. With several pushes to a step, pushes that wait for
    others when workers stop, evaluate or save are applied then.

    The following settings compensate for delays and for the small batch of a push; with one worker none of them changes
    anything, but a `rate_factor` that is given. By default rates and momentum are lowered, and rates rise slowly, as
    measured best; ``ASGD(rate_factor=1, correct_momentum=False, warmup_steps=0)`` is the paper's rule.
    """

    pushes_per_step: int = Field(default=1, ge=1)
    """Number of pushes, of any workers, whose mean servers take one step with (n-softsync of Zhang et al. 2016). With
    the number of workers a step has the samples of a synchronous one, and learning rates are the same."""
    rate_factor: float | None = Field(default=None, gt=0)
    """Factor of the learning rate. None: the root of the part of a synchronous step's samples that a step has, at most
    1."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps' worth of a synchronous step's samples over which the rate rises linearly, beside the schedule's own
    warm-up; none with one worker. None: a tenth of the run, at most 30."""
    scale_rate: bool = False
    """Whether the learning rate of a push is divided by 1 + its delay (Zhang et al. 2016, Staleness-aware ASGD). With
    several pushes to a step they are averaged with these factors as weights, and the rate is multiplied by their
    mean."""
    compensation: float = Field(default=0.0, ge=0)
    """Lambda of delay compensation (Zheng et al. 2017, DC-ASGD): g + lambda g g (x - x_old), elementwise, where x_old
    are the parameters of the gradient. The servers keep them for each worker. 0 for none."""
    compensation_decay: float | None = Field(default=None, ge=0, lt=1)
    """Decay of a running mean of g g, by whose root lambda is divided (DC-ASGD-a); None for a constant lambda."""
    correct_momentum: bool | None = None
    """Whether the servers' momentum (the first of Adam's betas) is lowered by what asynchrony adds (Mitliagkas et al.
    2016): an average delay of d acts like momentum d / (1 + d), which is 1 - 1/n with n equal workers. None: for
    optimizers with betas only, since those with plain momentum move less with less of it."""
    least_momentum: float = Field(default=0.5, ge=0, lt=1)
    """Momentum below which it is not lowered; 0 as in the paper."""

    @model_validator(mode="after")
    def _check_compensation(self) -> Self:
        if self.compensation_decay is not None and not self.compensation:
            raise SettingsError("compensation must be more than 0 with compensation_decay, but got 0; give both")
        return self

    @property
    def is_asynchronous(self) -> bool:
        """Always true."""
        return True

    @property
    def runs_optimizer(self) -> bool:
        """Always false: the servers' optimizer runs."""
        return False

    @property
    def applies_at_once(self) -> bool:
        """Always true."""
        return True

    @property
    def sums_samples(self) -> bool:
        """Always false: each push is a mean."""
        return False

    def start_server_update(
        self, num_workers: int, optimizer: torch.optim.Optimizer, *, number: int = 0
    ) -> ServerUpdate:
        """Return the update that applies pushes on arrival."""
        corrects = self.correct_momentum
        if corrects and not any(
            group.get("momentum") or group.get("betas", (0,))[0] for group in optimizer.param_groups
        ):
            raise SettingsError(
                f"the optimizer must have momentum with correct_momentum, but got {type(optimizer).__name__} without; "
                "take AdamW, or SGD with momentum, or turn correct_momentum off"
            )
        if corrects is None:
            corrects = all("betas" in group for group in optimizer.param_groups)
        rate_factor = self.rate_factor
        if rate_factor is None:
            rate_factor = math.sqrt(min(1.0, self.pushes_per_step / num_workers))
        steps = _MOST_WARMUP if self.warmup_steps is None else self.warmup_steps
        num_rising = steps * num_workers // self.pushes_per_step if num_workers > 1 else 0
        return _AsynchronousUpdate(self.model_copy(update={"correct_momentum": corrects}), rate_factor, num_rising)

    def fit_length(self, num_steps: int) -> Self:
        """Return the rule with the warm-up chosen."""
        if self.warmup_steps is not None:
            return self
        return self.model_copy(update={"warmup_steps": min(_MOST_WARMUP, num_steps // 10)})


_MOMENTUM: dict[str, Callable[[Any, Callable[[float], float]], Any]] = {
    "momentum": lambda momentum, lower: lower(momentum),
    "betas": lambda betas, lower: (lower(betas[0]), *betas[1:]),
}
"""Function that changes the momentum by another, by its name in an optimizer's settings."""
_MOST_WARMUP = 30
"""Warm-up by default, at most, in steps' worth of samples."""
_EPSILON = 1e-7
_SQUARES = "mean_square"
"""Name of mean squares of gradients in checkpoints."""
_MEMORY = 0.99
"""Decay of the running mean of delays."""


@contextmanager
def _less_momentum(optimizer: torch.optim.Optimizer, by: float, least: float) -> Iterator[None]:
    def lower(momentum: float) -> float:
        return min(momentum, max(least, momentum - by))

    groups = optimizer.param_groups
    settings = [{name: group[name] for name in _MOMENTUM.keys() & group.keys()} for group in groups]
    for group, found in zip(groups, settings, strict=True):
        group.update({name: _MOMENTUM[name](value, lower) for name, value in found.items()})
    try:
        yield
    finally:
        for group, found in zip(groups, settings, strict=True):
            group.update(found)


class _PendingPushes:
    """Pushes that wait for others.

    Args:
        values: Buffers of their sum; new ones by default.
    """

    def __init__(self, values: Sequence[Tensor] = ()) -> None:
        self.values = list(values)
        self.num_pushes = 0
        self.weight = 0.0
        """Sum of the pushes' factors."""
        self.used: list[bool] = []
        self.rates: list[float] = []
        """Learning rates of the last push."""

    def add(self, push: Push, factor: float) -> None:
        """Add `factor` times a push."""
        if not self.num_pushes:
            self.values = self.values or [torch.empty_like(value) for value in push.values]
            self.used = [False] * len(push.used)
            torch._foreach_zero_(self.values)
        torch._foreach_add_(self.values, list(push.values), alpha=factor)
        self.used = [known or new for known, new in zip(self.used, push.used, strict=True)]
        self.rates = list(push.rates)
        self.num_pushes += 1
        self.weight += factor


class _AsynchronousUpdate(ServerUpdate):
    """Applies pushes on arrival.

    Args:
        rule: Settings, with nothing left open.
        rate_factor: Factor of the learning rate.
        num_rising: Number of the server's first steps over which the rate rises.
    """

    def __init__(self, rule: ASGD, rate_factor: float, num_rising: int) -> None:
        super().__init__(FreeClocks())
        self._rule, self._rate_factor, self._num_rising = rule, rate_factor, num_rising
        self._sum = _PendingPushes()
        self._mean_squares: list[Tensor] = []
        self._mean_delay = 0.0
        self._num_delays = 0

    def push(self, shard: Shard, push: Push) -> bool:
        """Apply the push."""
        shard.note_used(push)
        if push.weight == 0:
            return True
        delay = shard.version - push.version
        shard.delays[delay] += 1
        self._num_delays += 1
        weight = max(1 - _MEMORY, 1 / self._num_delays)
        self._mean_delay += weight * (delay - self._mean_delay)
        if self._rule.compensation:
            self._compensate(shard, push, delay)
        factor = 1 / (1 + delay) if self._rule.scale_rate else 1.0
        if self._rule.pushes_per_step == 1:
            self._step(shard, push.values, push.used, [rate * factor for rate in push.rates])
            return True
        self._sum.add(push, factor)
        if self._sum.num_pushes == self._rule.pushes_per_step:
            self._step_with_mean(shard)
        return True

    def settle(self, shard: Shard) -> None:
        """Take a step with the pushes so far, once no worker will add to them: all stop, or wait for a checkpoint."""
        if not self.clocks.clocks:
            self.finish(shard)

    def finish(self, shard: Shard) -> None:
        """Take a step with the pushes so far."""
        if self._sum.num_pushes:
            self._step_with_mean(shard)

    def state(self, shard: Shard) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the mean squares, if any, and the mean delay."""
        squares = {f"{_SQUARES}/{block.name}": t for block, t in zip(shard.blocks, self._mean_squares, strict=False)}
        return squares, {"mean_delay": self._mean_delay, "num_delays": self._num_delays}

    def load_state(self, shard: Shard, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Load both."""
        self._mean_delay = numbers.get("mean_delay", 0.0)
        self._num_delays = int(numbers.get("num_delays", 0))
        names = [f"{_SQUARES}/{block.name}" for block in shard.blocks]
        self._mean_squares = [tensors[name].clone() for name in names] if tensors.keys() >= set(names) else []

    def _step_with_mean(self, shard: Shard) -> None:
        mean, self._sum = self._sum, _PendingPushes(self._sum.values)
        torch._foreach_div_(mean.values, mean.weight)
        factor = mean.weight / mean.num_pushes  # of the rate: optimizers such as Adam cancel a factor of gradients
        self._step(shard, mean.values, mean.used, [rate * factor for rate in mean.rates])

    def _step(self, shard: Shard, values: Sequence[Tensor], used: Sequence[bool], rates: Sequence[float]) -> None:
        implicit = self._mean_delay / (1 + self._mean_delay) if self._rule.correct_momentum else 0.0
        risen = min(1.0, (shard.version + 1) / self._num_rising) if self._num_rising else 1.0
        with _less_momentum(shard.optimizer, implicit, self._rule.least_momentum):
            shard.step(values, used, [rate * self._rate_factor * risen for rate in rates])

    def _compensate(self, shard: Shard, push: Push, delay: int) -> None:
        decay = self._rule.compensation_decay
        if decay is not None and not self._mean_squares:
            self._mean_squares = [torch.zeros_like(value) for value in push.values]
        for number, (value, known) in enumerate(zip(push.values, push.known, strict=True)):
            if not push.used[number]:
                continue
            square = value * value
            drift = shard.values.tensors[number] - known
            if decay is not None:
                mean = self._mean_squares[number].mul_(decay).add_(square, alpha=1 - decay)
                square = square / (mean + _EPSILON).sqrt_()
            if delay:
                value.addcmul_(square, drift, value=self._rule.compensation)
