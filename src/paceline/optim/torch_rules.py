"""Torch's own update rules, and which of them update each element independently."""

from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.optim.base import DecayRate, NamedOptimizer
from paceline.registry import register


@register("sgd")
class SGD(NamedOptimizer):
    """Stochastic gradient descent with momentum (Sutskever 2013)."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Base learning rate, before the schedule's factor."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False

    @model_validator(mode="after")
    def _check_nesterov(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("momentum must be more than 0 with nesterov, but got 0.0; give it or turn nesterov off")
        return self

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return torch.optim.SGD, which also takes late gradients."""
        return SGDRule(
            self.group_parameters(module),
            lr=self.learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
            # Torch's fused SGD, unlike its fused Adam, does not support DTensors.
            fused=not any(isinstance(parameter, DTensor) for parameter in module.parameters()),
        )


class SGDRule(torch.optim.SGD):
    """torch.optim.SGD for parameters that may get their first gradient later than others.

    Torch's fused kernel needs a momentum buffer of every parameter or of none, and raises a TypeError otherwise. With
    buffers of zeros it takes the same steps that torch's other kernels take without buffers.
    """

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], momenta: list[Tensor | None]
    ) -> bool:
        has_sparse: bool = super()._init_group(group, params, grads, momenta)  # type: ignore[no-untyped-call]
        if group["momentum"]:
            momenta[:] = [
                torch.zeros_like(parameter) if momentum is None else momentum
                for parameter, momentum in zip(params, momenta, strict=True)
            ]
        return has_sparse


@register("adamw")
class AdamW(NamedOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019); without decay it is Adam."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Base learning rate, before the schedule's factor."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices and larger tensors; vectors (biases, norms) have none."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Addend to the root of the second moment, so that nothing is divided by zero."""

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return torch.optim.AdamW."""
        return torch.optim.AdamW(
            self.group_parameters(module),
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.epsilon,
            fused=True,
        )


@register("adam")
class Adam(NamedOptimizer):
    """Adam (Kingma and Ba 2015), whose weight decay is added to the gradient."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Base learning rate, before the schedule's factor."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Addend to the root of the second moment, so that nothing is divided by zero."""

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return torch.optim.Adam."""
        return torch.optim.Adam(
            self.group_parameters(module),
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.epsilon,
            fused=True,
        )


BY_ELEMENT = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers that update each element by its own gradient. Subclasses are excluded, since they may do otherwise.

LARS, LAMB and Adafactor are not among them, since they need norms of whole parameters, nor is AdamW in 8 bits,
where the elements of a block share a scale.
"""


def updates_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer may update a subset of its parameters, or a part of one, separately."""
    return type(optimizer) in (*BY_ELEMENT, SGDRule)


ADAPTIVE = (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta)
"""Optimizers without betas that divide by the size of the gradients that they have seen."""


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is Adam or its kin (all have betas), RMSprop, Adagrad or Adadelta, or derived."""
    return isinstance(optimizer, ADAPTIVE) or any("betas" in group for group in optimizer.param_groups)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is torch's or Paceline's own, and not derived: what its step does is known."""
    return type(optimizer).__module__.startswith(("torch.optim.", "paceline.optim."))
