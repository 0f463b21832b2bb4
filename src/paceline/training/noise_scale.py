"""The gradient noise scale: the number of samples from which a step's gradient is more signal than noise.

McCandlish et al. 2018, "An empirical model of large-batch training": B_simple = tr(S) / |G|^2, where G is the true
gradient and S the covariance of one sample's. A mean over n samples has E|g|^2 = |G|^2 + tr(S) / n. So k parts of a
step, of n_1 ... n_k samples and mean gradients g_1 ... g_k, and their joint gradient g of N = sum n_i samples give

    tr(S) = (sum n_i |g_i|^2 - N |g|^2) / (k - 1),    |G|^2 = |g|^2 - tr(S) / N,

both without bias, for parts of any sizes; with equal ones it is the paper's estimate from two batch sizes. The parts
are the samples of one backward pass on each worker: its share, or a micro-batch of it. Numerator and denominator are
averaged separately, over the steps of an interval and then with a moving average over intervals, before they are
divided: their ratio in a single step is noise.

On the wire it costs two numbers per worker and interval. It needs no memory: gradients are measured as autograd makes
them, before they are accumulated or exchanged. It needs gradients that are summed exactly over all workers at each
step.

Difference from the paper: all samples have the same weight. If they have different numbers of tokens, as in masked
language models, it is the noise scale of an average sample.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm.group import Group
from paceline.compression import NoCodec
from paceline.errors import SettingsError
from paceline.monitor.events import GradientNoiseMeasured
from paceline.replica.step_result import StepResult
from paceline.sync import EveryStep, Rule
from paceline.topology.layout import Layout

NO_CLIPPING = 1e30
"""Bound that no gradient norm reaches: a replica reports a norm only if it is bounded."""
MEMORY = 0.8
"""Decay of the moving average per interval."""


@dataclass
class Noise:
    """Moving averages of the noise scale's numerator and denominator."""

    trace: float = 0.0
    squared_norm: float = 0.0
    weight: float = 0.0
    """Weight of both averages, which begin at 0."""

    def add(self, trace: float, squared_norm: float) -> None:
        """Add the means of an interval."""
        self.trace = MEMORY * self.trace + (1 - MEMORY) * trace
        self.squared_norm = MEMORY * self.squared_norm + (1 - MEMORY) * squared_norm
        self.weight = MEMORY * self.weight + (1 - MEMORY)

    @property
    def scale(self) -> float | None:
        """B_simple, in samples; None if the squared norm cannot be distinguished from 0."""
        return max(0.0, self.trace) / self.squared_norm if self.squared_norm > 0 else None


@dataclass
class NoiseSums:
    """Sums over the steps since the last measurement."""

    own_squares: float = 0.0
    """sum n_i |g_i|^2 over this worker's parts."""
    num_own_parts: int = 0
    num_steps: int = 0
    squares: float = 0.0
    """sum |g|^2 of the steps' joint gradients."""
    weighted_squares: float = 0.0
    """sum N |g|^2."""
    inverse_samples: float = 0.0
    """sum 1 / N."""


@dataclass
class _Part:
    """Gradient of one backward pass."""

    num_samples: int
    scale: Tensor | None = None
    """Factor that backward multiplied the gradient of the mean by."""
    norms: list[Tensor] = field(default_factory=list)
    """Norm of each parameter's gradient, times that factor."""


class NoiseMeter:
    """Measures the gradient noise scale of a training. Every worker has one, and makes the same calls.

    Args:
        module: Module whose gradients are measured.
        group: All workers.
        interval: Steps from one measurement to the next.
        num_parts: Parts into which each worker splits its share of a step.

    Raises:
        SettingsError: There is only one part, and none to compare it with.
    """

    def __init__(self, module: nn.Module, group: Group, *, interval: int, num_parts: int) -> None:
        if group.size * num_parts < 2:
            raise SettingsError(
                "the gradient noise scale must be measured on a step of 2 parts or more, but got 1 worker and 1 "
                "micro-batch; give num_micro_batches=2 (--num_micro_batches 2), or more workers"
            )
        self._group, self._interval = group, interval
        self._parts: list[_Part] = []
        self._sums = NoiseSums()
        self._noise = Noise()
        self._hooks: list[RemovableHandle] = []
        self.use(module)

    def use(self, module: nn.Module) -> None:
        """Measure the gradients of `module` from now on, instead of the previous module's."""
        self.close()
        self._hooks = [
            parameter.register_hook(self._record) for parameter in module.parameters() if parameter.requires_grad
        ]

    def watch(self, mean: Tensor, num_samples: int) -> None:
        """Measure the gradient of `mean`, a mean loss over `num_samples`, in the next backward pass."""
        part = _Part(num_samples)
        self._parts.append(part)

        def note_scale(scale: Tensor) -> None:
            part.scale = scale.detach()

        mean.register_hook(note_scale)

    def end_step(self, step: int, result: StepResult, num_samples: int) -> GradientNoiseMeasured | None:
        """Record a step, and return the measurement if an interval ends with it.

        Args:
            step: Number of steps done, including this one.
            result: Result of the step.
            num_samples: Samples of the step, over all workers.
        """
        parts, self._parts = [part for part in self._parts if part.norms and part.num_samples], []
        if not result.skipped and result.gradient_norm is not None:
            sums, square = self._sums, result.gradient_norm**2
            sums.own_squares += sum(_square(part) * part.num_samples for part in parts)
            sums.num_own_parts += len(parts)
            sums.num_steps += 1
            sums.squares += square
            sums.weighted_squares += num_samples * square
            sums.inverse_samples += 1 / num_samples
        return self._measure() if step % self._interval == 0 else None

    @property
    def scale(self) -> float | None:
        """Latest noise scale, in samples; None if it is too large to measure."""
        return self._noise.scale

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON; every worker calls it."""
        own = self._group.gather_documents([self._sums.own_squares, self._sums.num_own_parts], name="noise of parts")
        return {"noise": vars(self._noise), "sums": vars(self._sums), "own": own}

    def own_state(self) -> dict[str, Any]:
        """Return the state without sums since the last measurement, of which this worker knows its own only."""
        return {"noise": vars(self._noise), "sums": vars(NoiseSums()), "own": [[0.0, 0]]}

    def load(self, state: dict[str, Any]) -> None:
        """Load a saved state; with another number of workers rank 0 continues from the sums of all saved ones."""
        self._noise, self._sums = Noise(**state["noise"]), NoiseSums(**state["sums"])
        own, rank = state["own"], self._group.rank
        if len(own) != self._group.size:
            own = [[sum(column) for column in zip(*own, strict=True)], *([[0.0, 0]] * (self._group.size - 1))]
        self._sums.own_squares, self._sums.num_own_parts = own[rank]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _record(self, gradient: Tensor) -> None:
        if self._parts:
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self._parts[-1].norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=dtype))

    def _measure(self) -> GradientNoiseMeasured | None:
        sums, self._sums = self._sums, NoiseSums()
        totals = torch.tensor([sums.own_squares, sums.num_own_parts], dtype=torch.float64, device=self._group.device)
        self._group.all_reduce(totals, name="noise of parts").wait()
        squares, num_parts = totals.tolist()
        if num_parts <= sums.num_steps:  # every step was a single part
            return None
        trace = (squares - sums.weighted_squares) / (num_parts - sums.num_steps)
        self._noise.add(trace, (sums.squares - trace * sums.inverse_samples) / sums.num_steps)
        noise = self._noise
        return GradientNoiseMeasured(
            noise_scale=noise.scale,
            trace=noise.trace / noise.weight,
            squared_norm=noise.squared_norm / noise.weight,
            num_steps=sums.num_steps,
        )


def check_noise(sync: Rule, layout: Layout) -> None:
    """Refuse to measure if gradients are not summed exactly over all workers, each with a whole model.

    Raises:
        ValueError: A setting does not allow it; the message says which would.
    """
    if not isinstance(sync, EveryStep) or not isinstance(sync.codec, NoCodec):
        codec = f" with codec {sync.codec.name}" if isinstance(sync, EveryStep) else ""
        raise ValueError(
            "the gradient noise scale must be measured on gradients that are summed exactly at every step, but got "
            f"sync {sync.name}{codec}; take every_step without a codec"
        )
    if not layout.is_plain:
        raise ValueError(
            "the gradient noise scale must be measured where each worker holds a whole model, since it compares the "
            "norm of a worker's whole gradient with that of the sum, but got a layout with other axes than data: "
            f"{layout}; measure it on fewer steps without them, or leave the measurement out "
            "(--noise_scale_interval 0, and a batch_schedule that does not need it)"
        )


def _square(part: _Part) -> float:
    """Return |g|^2 of a part's mean gradient."""
    assert part.scale is not None
    norm = torch.linalg.vector_norm(torch.stack([norm.double() for norm in part.norms])) / part.scale.double()
    return float(norm) ** 2
