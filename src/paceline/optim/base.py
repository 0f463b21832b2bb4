"""What every optimizer's settings are."""

from abc import abstractmethod

import torch
from pydantic import Field
from torch import nn

from paceline.registry import Family


class Optimizer(Family):
    """Settings of an update rule."""

    family = "optimizer"

    learning_rate: float = Field(gt=0)
    """Base learning rate, before the schedule's factor."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of matrices and larger tensors; vectors (biases, norms) have none."""

    @abstractmethod
    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of torch's over the parameters of `module`."""

    def group_parameters(self, module: nn.Module) -> list[dict[str, object]]:
        """Return parameter groups in which only tensors of two dims or more decay."""
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]
