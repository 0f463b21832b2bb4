"""The model of a run: settings that build a module once the data is known."""

from abc import abstractmethod
from typing import NamedTuple, Self

from torch import nn

from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.functions import Function
from paceline.registry import Family, register


class LayerStack(NamedTuple):
    """Where the layers of a model are that can be built with any number of them."""

    num_layers: int
    path: str
    """Name of their `nn.ModuleList`: layer 2's parameters are called ``<path>.2.<rest>``."""
    branch_ends: tuple[str, ...]
    """How names of parameters end that are the last on each branch: with zeros there, a layer hands its input on."""


class Model(Family):
    """Settings of a model. In a `Run`, a plain module-level function that returns a module will do instead."""

    family = "model"

    @abstractmethod
    def build(self, spec: Spec) -> nn.Module:
        """Return a new module with random weights for data of the given `spec`."""

    @property
    def layer_stack(self) -> LayerStack | None:
        """Its layers, where it can become deeper while it is trained; else None."""
        return None

    def with_depth(self, num_layers: int) -> Self:
        """Return the same settings for another number of layers; only where there is a `layer_stack`."""
        raise AssertionError(f"model {self.name} has no depth")


@register("function")
class FunctionModel(Function, Model):
    """Whatever module a function of the user's returns, unchanged."""

    def build(self, spec: Spec) -> nn.Module:
        """Call the function; `spec` is left to it to know."""
        module = self.call()
        if not isinstance(module, nn.Module):
            raise SettingsError(f"{self.path} must return a torch.nn.Module, but got {type(module).__name__}")
        return module
