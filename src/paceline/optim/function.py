"""Optimizers that a person's own function makes."""

from typing import ClassVar, Self

import torch
from pydantic import model_validator
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.errors import SettingsError
from paceline.functions import UNKNOWN_NAME, Function
from paceline.optim.base import Optimizer
from paceline.registry import register

_UNUSABLE = (torch.optim.LBFGS, torch.optim.SparseAdam)
"""Optimizers that need a closure, or refuse dense gradients."""
_OF_MODEL, _OF_PARAMETERS = ("model", "module"), ("params", "parameters")
"""Names of the first parameter of functions that take the model, and of those that take its trained parameters."""


@register("function")
class FunctionOptimizer(Function, Optimizer):
    """The optimizer that a function returns, or one of torch's classes makes.

    Its first parameter says what it is called with: ``model``, whose parameters have names to make groups by; or
    ``params``, as of torch's own optimizers, the list of parameters that are trained. Learning rates are those of its
    parameter groups; the run's `schedule` multiplies each. ``module`` and ``parameters`` mean the same; other names are
    refused.
    """

    given: ClassVar[tuple[str, ...]] = ("the model or its parameters",)
    returned: ClassVar[str] = "torch.optim:Optimizer"

    @model_validator(mode="after")
    def _check_first(self) -> Self:
        if self.first_parameter not in (*_OF_MODEL, *_OF_PARAMETERS, UNKNOWN_NAME):
            raise SettingsError(
                f"the first parameter of {self.path} must be called params, for a function that takes the trained "
                f"parameters, or model, for one that takes the model, but got {self.first_parameter!r}; rename it"
            )
        return self

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Call the function.

        Raises:
            SettingsError: The function refuses its arguments, or returns no optimizer that can be used.
        """
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        made = self.make(trained if self.first_parameter in _OF_PARAMETERS else module)
        if not isinstance(made, torch.optim.Optimizer) or isinstance(made, _UNUSABLE):
            raise SettingsError(
                f"{self.path} must return an optimizer of torch's that steps without a closure, by dense gradients, "
                f"but got {type(made).__name__}; build another of the model's parameters"
            )
        made.param_groups = [part for group in made.param_groups for part in _part(group)]
        return made


def _part(group: dict[str, object]) -> list[dict[str, object]]:
    """Return a parameter group as one for each mesh of its DTensors, since torch's fused rules take no mixture."""
    by_mesh: dict[object, list[nn.Parameter]] = {}
    parameters: list[nn.Parameter] = group["params"]  # type: ignore[assignment]
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    return [{**group, "params": held} for held in by_mesh.values()] if len(by_mesh) > 1 else [group]
