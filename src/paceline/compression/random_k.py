"""Random-k: all workers send the same elements, drawn again at every step."""

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Size, Tensor

from paceline.comm.streams import send_to
from paceline.compression.codec import (
    Algebra,
    AllReduce,
    Codec,
    CodecContext,
    Exchange,
    Exchanged,
    Request,
    State,
    dense_payloads,
    exchange_dense,
    is_finite,
    shared_generator,
)
from paceline.compression.top_k import count_kept
from paceline.errors import SettingsError
from paceline.registry import register


@register("random_k")
class RandomK(Codec):
    """Elements at indices that all workers draw from one seed (Stich et al. 2018; Konecny et al. 2016).

    Of d elements k = ceil(`density` * d), at least 1, are sent, without replacement. With error feedback they are
    sent unscaled, and the rest is the residual: the error is (1 - k/d) of the squared norm, on average. Without
    feedback they may be `scaled` by d / k, so that the sum is right on average, though its variance is d / k times as
    large. Density 1 is the exact sum.

    On the wire: one all-reduce of k values, 4 bytes each; every worker knows the indices.
    """

    algebra = Algebra.LINEAR
    suits_steps = True

    density: float = Field(default=0.01, gt=0, le=1)
    """Share of the elements that are sent."""
    error_feedback: bool = True
    """Whether unsent elements are added to the next step's value."""
    scaled: bool = False
    """Whether the sum is multiplied by d / k, which makes it unbiased; only without error feedback."""

    @model_validator(mode="after")
    def _must_not_expand(self) -> Self:
        if self.scaled and self.error_feedback:
            raise SettingsError(
                "scaled must be false with error feedback, but got true: d / k times an element leaves a residual "
                "of 1 - d / k times it, which grows from step to step; set error_feedback to false, or scaled"
            )
        return self

    def exchange(self, value: Tensor, state: State, context: CodecContext) -> Exchange:
        """Sum the drawn elements."""
        if self.is_dense(value.shape):
            return (yield from exchange_dense(value))
        num_kept = count_kept(value.shape, self.density)
        indices = send_to(value.device, draw_indices(value.numel(), num_kept, shared_generator(context)))
        remainder = value + state["worker"] if "worker" in state else value.clone()
        finite = is_finite(remainder)
        payload = remainder.view(-1)[indices]
        remainder.view(-1).index_fill_(0, indices, 0)
        summed = yield AllReduce(payload, finite)
        total = torch.zeros_like(value)
        total.view(-1).index_copy_(0, indices, summed * (value.numel() / num_kept) if self.scaled else summed)
        return Exchanged(total, {"worker": remainder} if self.error_feedback else {}, finite)

    def contraction(self, shape: Size) -> float:
        """Return the share of the elements that are sent."""
        return 1.0 if self.is_dense(shape) else count_kept(shape, self.density) / shape.numel()

    def payloads(self, shape: Size, num_workers: int) -> list[tuple[type[Request], int]]:
        """One round."""
        if self.is_dense(shape):
            return dense_payloads(shape)
        return [(AllReduce, 4 * count_kept(shape, self.density))]


def draw_indices(num_elements: int, num_drawn: int, generator: torch.Generator) -> Tensor:
    """Draw `num_drawn` different numbers below `num_elements`; every set of them is equally likely.

    The time is proportional to `num_drawn`, not to `num_elements`.
    """
    if 4 * num_drawn > num_elements:
        return torch.randperm(num_elements, generator=generator)[:num_drawn].sort().values
    drawn = torch.empty(0, dtype=torch.int64)
    while len(drawn) < num_drawn:
        missing = num_drawn - len(drawn)
        more = torch.randint(num_elements, (missing + missing // 4 + 8,), generator=generator)
        drawn = torch.cat([drawn, more]).unique()
    # Too many by now, and sorted: those that are dropped must be random as well.
    return drawn[torch.randperm(len(drawn), generator=generator)[:num_drawn]].sort().values
