"""The common base of the update rules that torch lacks."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import GradientError


class UpdateRule(torch.optim.Optimizer, ABC):
    """An optimizer that updates all parameters of a group that have a gradient at once.

    Parameters may be DTensors: a rule works on this rank's part, and the state of a parameter has the layout of the
    parameter.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step; parameters without a gradient stay as they are.

        Raises:
            GradientError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if any(parameter.grad.is_sparse for parameter in used):
                raise GradientError(
                    f"gradients must be dense for {type(self).__name__}, but got a sparse one; build the embedding "
                    "with sparse=False"
                )
            if used:
                self.update(group, used)
        return loss

    @abstractmethod
    def update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Update `parameters`, those of a group that have a gradient."""


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, as a view; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a parameter's gradient: that of the elements it holds."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)
