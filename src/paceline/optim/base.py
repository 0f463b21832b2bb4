"""The contract of an optimizer's settings, and how its learning rate follows the batch."""

import math
from abc import abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.registry import Family

DecayRate = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of an exponential average."""
Scaling = Literal["none", "linear", "square_root"]


class Optimizer(Family):
    """Settings of an update rule. A `Run` also takes a function that returns a torch optimizer."""

    family = "optimizer"
    setting = "optimizer"

    scaling: Scaling = "none"
    """Rule by which the learning rate follows the global batch: not at all, in proportion, or by the square root."""
    base_batch: int = Field(default=256, ge=1)
    """Global batch that the learning rate is meant for, if it is scaled."""

    @abstractmethod
    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return a torch optimizer over the parameters of `module`, with its learning rates."""

    def scale_rate(self, global_batch: int) -> float:
        """Return the factor of learning rates in steps of `global_batch` samples."""
        return scale(self.scaling, global_batch, self.base_batch)


class NamedOptimizer(Optimizer):
    """Settings of an update rule that is registered under a name."""

    learning_rate: float = Field(gt=0)
    """Base learning rate, before the schedule's factor."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of matrices and larger tensors; vectors (biases, norms) have none."""

    def group_parameters(self, module: nn.Module) -> list[dict[str, object]]:
        """Return parameter groups in which only tensors of two dims or more decay.

        DTensors of different meshes, and plain tensors, are in separate groups: torch's fused rules take no mixture.
        """
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
        for parameter in sorted(parameters, key=lambda parameter: parameter.dim() < 2):
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.dim() >= 2, mesh), []).append(parameter)
        return [
            {"params": params, "weight_decay": self.weight_decay if decays else 0.0}
            for (decays, _), params in groups.items()
        ]


def scale(rule: Scaling, global_batch: int, base_batch: int) -> float:
    """Return the factor of the learning rate for a batch, if it was tuned for batches of `base_batch`.

    Args:
        rule: linear: in proportion to the batch, as many small steps would go as far (Krizhevsky 2014; Goyal 2017), for
            SGD; square_root: by the square root, which preserves the noise of an update (Hoffer 2017), for Adam and
            LAMB; none: 1.
        global_batch: Samples of a step, over all workers.
        base_batch: Samples of a step that the learning rate was tuned for.
    """
    ratio = global_batch / base_batch
    return {"none": 1.0, "linear": ratio, "square_root": math.sqrt(ratio)}[rule]
