"""The update rules that torch has."""

from typing import Annotated, Self

import torch
from pydantic import Field, model_validator
from torch import nn

from paceline.optim.base import Optimizer
from paceline.registry import register

_Decay = Annotated[float, Field(ge=0, lt=1)]


@register("sgd")
class SGD(Optimizer):
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
        """Return torch.optim.SGD."""
        return torch.optim.SGD(
            self.group_parameters(module),
            lr=self.learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
            fused=True,
        )


@register("adamw")
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019); without decay it is Adam."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Base learning rate, before the schedule's factor."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices and larger tensors; vectors (biases, norms) have none."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0)

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return torch.optim.AdamW."""
        return torch.optim.AdamW(
            self.group_parameters(module),
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.epsilon,
            fused=True,
        )
