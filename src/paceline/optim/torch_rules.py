"""The update rules that torch has."""

import torch
from pydantic import Field
from torch import nn

from paceline.optim.base import Optimizer
from paceline.registry import register


@register("sgd")
class SGD(Optimizer):
    """Stochastic gradient descent with momentum (Sutskever 2013)."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Base learning rate, before the schedule's factor."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False

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
    betas: tuple[float, float] = (0.9, 0.95)
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
