"""Deep gradient compression: top-k of the momentum-corrected gradient."""

import math
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Size, Tensor

from paceline.compression.codec import (
    Algebra,
    AllGather,
    Codec,
    CodecContext,
    Exchange,
    Exchanged,
    Request,
    State,
    dense_payloads,
    exchange_dense,
)
from paceline.compression.top_k import count_kept, exchange_largest, largest_bytes
from paceline.errors import SettingsError
from paceline.registry import register


@register("dgc")
class DGC(Codec):
    """Deep gradient compression (Lin et al. 2018): sparse sums that preserve the effect of momentum.

    It replaces the optimizer's momentum: **use an optimizer without momentum**, such as SGD with momentum 0, or
    momentum is applied twice. Each worker keeps momentum u and unsent velocity v of its own gradient g,

        u <- momentum * u + g;   v <- v + u;   send the largest of v;   v, u <- 0 where sent,

    so that an element that waits carries its momentum when it is sent (correction), and no stale momentum remains
    (`masking`). `clip_norm` bounds g before it is accumulated: the accumulated velocity is the sum of many steps, and
    clipping that would undo it. The density falls exponentially over `warmup_steps`, as young networks change fast.

    With momentum 0 and no clipping it is `TopK`; at density 1 without masking, SGD with momentum; at density 1 with
    masking, plain SGD. The paper clips the norm over all parameters and lowers the density once an epoch; here the norm
    is that of a block, since blocks are encoded while others are still being computed, and the density falls at every
    step. Small blocks send all of u at every step.

    On the wire: the cost of `TopK` at the density of the step.
    """

    algebra = Algebra.GATHER
    conserves = False

    density: float = Field(default=0.01, gt=0, le=1)
    """Share of the elements that are sent, after the warm-up."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    masking: bool = True
    """Whether momentum restarts at zero where an element was sent."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest norm of a block of the sum over workers (before its division by the total weight). Each
    of n workers clips its part to this over sqrt(n): independent parts add up to it. None for no clipping."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps until the density is reached."""
    first_density: float = Field(default=0.25, gt=0, le=1)
    """Density at the first step of the warm-up."""

    @model_validator(mode="after")
    def _must_fall(self) -> Self:
        if self.warmup_steps and self.first_density < self.density:
            raise SettingsError(
                f"first_density must be at least density, but got {self.first_density} < {self.density}; "
                "raise it, or set warmup_steps to 0"
            )
        return self

    @property
    def carries_momentum(self) -> bool:
        """Whether momentum is not 0."""
        return self.momentum > 0

    def density_at(self, step: int) -> float:
        """Return the share of the elements that are sent at a step."""
        if step >= self.warmup_steps:
            return self.density
        fall = self.density / self.first_density
        return float(self.first_density * fall ** (step / self.warmup_steps))

    def exchange(self, value: Tensor, state: State, context: CodecContext) -> Exchange:
        """Gather the largest velocities of all workers; each worker adds them up, by rank."""
        momentum = self._accumulate(self._clip(value, context.num_workers), state)
        kept = {"momentum": momentum} if self.momentum else {}
        if self.is_dense(value.shape):
            summed = yield from exchange_dense(momentum)
            return Exchanged(summed.total, kept, summed.is_finite)
        num_kept = count_kept(value.shape, self.density_at(context.step))
        sent = yield from exchange_largest(momentum, state.get("worker"), num_kept)
        if kept and self.masking:
            momentum.view(-1).index_fill_(0, sent.indices.long(), 0)
        return Exchanged(sent.total, {"worker": sent.remainder, **kept}, sent.is_finite)

    def payloads(self, shape: Size, num_workers: int, step: int | None = None) -> list[tuple[type[Request], int]]:
        """One round; its size depends on `step` during the warm-up. None: after the warm-up."""
        if self.is_dense(shape):
            return dense_payloads(shape)
        density = self.density if step is None else self.density_at(step)
        return [(AllGather, largest_bytes(shape, count_kept(shape, density)))]

    def _clip(self, value: Tensor, num_workers: int) -> Tensor:
        if self.clip_norm is None:
            return value
        limit = self.clip_norm / math.sqrt(num_workers)
        # In double precision: squares of large numbers overflow, and an infinite norm would clip to zero.
        norm = torch.linalg.vector_norm(value, dtype=torch.float64)
        factor: Tensor = (limit / norm).clamp(max=1).float()
        return value * factor

    def _accumulate(self, value: Tensor, state: State) -> Tensor:
        """Return the new momentum, in its own memory if it is kept."""
        if self.momentum == 0:
            return value
        return torch.add(value, state["momentum"], alpha=self.momentum) if "momentum" in state else value.clone()
