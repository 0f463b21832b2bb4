"""The model of a run: settings that build a module once the data is known."""

from abc import abstractmethod
from typing import NamedTuple, Self

from torch import nn

from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.functions import Function
from paceline.registry import Family, register


class LayerStack(NamedTuple):
    """Place of the layers in a model that can be built with any number of them."""

    num_layers: int
    path: str
    """Name of the layers' `nn.ModuleList`: layer 2's parameters are called ``<path>.2.<rest>``."""
    branch_ends: tuple[str, ...]
    """Endings of the names of each branch's last parameters: with zeros there, a layer returns its input."""


class Model(Family):
    """Settings of a model. In a `Run`, a plain module-level function that returns a module will do instead."""

    family = "model"

    @abstractmethod
    def build(self, spec: Spec) -> nn.Module:
        """Return a new module with random weights for data of the given `spec`."""

    @property
    def layer_stack(self) -> LayerStack | None:
        """Layers of the model, if it can become deeper during training; else None."""
        return None

    def with_depth(self, num_layers: int) -> Self:
        """Return the same settings for another number of layers; only where there is a `layer_stack`."""
        raise AssertionError(f"model {self.name} has no depth")


@register("function")
class FunctionModel(Function, Model):
    """Module that a function of the user's returns, unchanged."""

    def build(self, spec: Spec) -> nn.Module:
        """Call the function, without `spec`."""
        module = self.call()
        if not isinstance(module, nn.Module):
            raise SettingsError(f"{self.path} must return a torch.nn.Module, but got {type(module).__name__}")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise SettingsError(
                f"the model of {self.path} must have parameters that require gradients, but {type(module).__name__} "
                "has none; return a module with some to train"
            )
        return module
