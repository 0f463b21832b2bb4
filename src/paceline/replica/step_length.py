"""Length of coded steps: the noise of the workers' gradients, measured on a sample of their elements."""

import math
from collections.abc import Mapping

import torch
from torch import Size, Tensor

from paceline.comm.group import Group, Work
from paceline.compression.codec import CodecContext, shared_generator
from paceline.sync.reducer import FlatBucket

_DECAY = 0.95
"""Weight of the measurements before, from step to step."""


class StepLength:
    """Factor that makes the workers' mean step as long as the step of an optimizer that sees the mean gradient.

    Adaptive optimizers divide by the root mean square of the gradients that they see. A worker's own gradient g_i has
    more noise than the mean g of n workers', so that its step is shorter by sqrt(E|g_i|^2 / E|g|^2): 1 without noise,
    sqrt(n) without anything else. Both are measured on elements that all workers draw from one seed, anew at each step,
    and the factor follows from the steps before, so that it is known when a step begins.

    On the wire: one all-reduce a step of the drawn elements and one more, 4 bytes each.

    Args:
        group: Group of the workers.
        parameters: Parameters to train, by name.
        seed: Random seed of the draws.
    """

    def __init__(self, group: Group, parameters: Mapping[str, Tensor], seed: int) -> None:
        self._group, self._seed = group, seed
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        counts = {name: _count_sampled(parameter.shape) for name, parameter in parameters.items()}
        repeats = torch.tensor(list(counts.values()), dtype=torch.int64)
        ends = repeats.cumsum(0).tolist()
        self._places = {name: slice(end - counts[name], end) for name, end in zip(counts, ends, strict=True)}
        self._sizes = torch.tensor(list(sizes.values()), dtype=torch.int64).repeat_interleave(repeats)
        self._weights = (self._sizes / repeats.repeat_interleave(repeats)).to(group.device)
        self._indices = self._sizes
        self._message = torch.zeros(len(self._sizes) + 1, dtype=torch.float32, device=group.device)
        self._work: Work | None = None
        self._noisy, self._mean = 0.0, 0.0

    @property
    def factor(self) -> float:
        """Factor of the next step, between 1 and the root of the number of workers; 1 before the first measurement."""
        ratio = self._noisy / self._mean if self._mean else 1.0
        return math.sqrt(min(max(ratio, 1.0), float(self._group.size)))

    @property
    def wire_bytes(self) -> int:
        """Bytes that this worker sends in a step, by an all-reduce that sends the least."""
        return round(2 * (self._group.size - 1) / self._group.size * self._message.nbytes)

    def begin(self, step: int) -> None:
        """Draw the elements of a step."""
        generator = shared_generator(CodecContext("step length", step, self._group.rank, self._group.size, self._seed))
        drawn = torch.rand(len(self._sizes), dtype=torch.float64, generator=generator)
        self._indices = (drawn * self._sizes).long().to(self._group.device)
        self._message.zero_()

    def read(self, bucket: FlatBucket, scale: float = 1.0) -> None:
        """Read the drawn elements of a bucket with this worker's own gradients, and multiply them by `scale`."""
        for name, view in bucket.blocks.items():
            first = view.storage_offset() - bucket.numerators.storage_offset()
            block = bucket.numerators[first : first + view.numel()]
            self._message[self._places[name]] = block[self._indices[self._places[name]]].real.float() * scale

    def send(self, share: float) -> None:
        """Send what was read, multiplied by this worker's `share`."""
        drawn = self._message[:-1]
        self._message[-1] = self._square(drawn)
        self._work = self._group.all_reduce(self._message.mul_(share), name="step length")

    def receive(self, divisor: float) -> None:
        """Wait for the sums, and divide them by `divisor`."""
        assert self._work is not None
        self._work.wait()
        self._message /= divisor

    def commit(self) -> None:
        """Count what was received, if it is not too large for fp32: the step has been applied."""
        noisy, mean = float(self._message[-1]), self._square(self._message[:-1])
        if math.isfinite(noisy + mean):
            self._noisy, self._mean = _DECAY * self._noisy + noisy, _DECAY * self._mean + mean

    def state_dict(self) -> dict[str, float]:
        """Return the measurements, the same on all workers, as JSON."""
        return {"noisy": self._noisy, "mean": self._mean}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from saved measurements."""
        self._noisy, self._mean = state["noisy"], state["mean"]

    def _square(self, drawn: Tensor) -> float:
        """Return an unbiased estimate of the squared norm of all elements."""
        return float((drawn.double().square() * self._weights).sum())


def _count_sampled(shape: Size) -> int:
    """Return the number of a parameter's elements that are drawn in a step."""
    return min(-(-shape.numel() // 1024), 64)
