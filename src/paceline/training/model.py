"""The model of a run: settings that build a module once the data is known."""

from abc import abstractmethod
from typing import ClassVar, NamedTuple, Self

from torch import nn

from paceline.data.base import Data, Spec
from paceline.data.formats.file_data import FileData
from paceline.data.padding import Padding
from paceline.errors import SettingsError
from paceline.functions import Function
from paceline.registry import Family, register
from paceline.topology.layout import Layout


class LayerStack(NamedTuple):
    """Place of the layers in a model that can be built with any number of them."""

    num_layers: int
    path: str
    """Name of the layers' `nn.ModuleList`: layer 2's parameters are called ``<path>.2.<rest>``."""
    branch_ends: tuple[str, ...]
    """Endings of the names of each branch's last parameters: with zeros there, a layer returns its input."""


class UnitWidth(NamedTuple):
    """Width of a model that can be built with any multiple of it, and then holds as many copies of each unit."""

    width: int
    divided: tuple[str, ...]
    """Names of vectors whose value is divided among the copies of a unit, since what reads them (a head that is tied
    to an embedding) does not divide it. Linear and convolution weights always do."""


class ModelSize(NamedTuple):
    """Size of a model that grows; None where it has none of its own."""

    num_layers: int | None
    width: int | None


class Model(Family):
    """Settings of a model. In a `Run`, a plain module-level function that returns a module will do instead."""

    family = "model"
    takes_documents: ClassVar[bool] = False
    """Whether its module keeps documents that share a row apart: see data packed_text."""

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

    @property
    def unit_width(self) -> UnitWidth | None:
        """Width of the model, if it can become wider during training; else None."""
        return None

    def with_width(self, width: int) -> Self:
        """Return the same settings for a multiple of the width; only where there is a `unit_width`."""
        raise AssertionError(f"model {self.name} has no width")


def size_of(model: Model) -> ModelSize:
    """Return the size of a model."""
    depth, width = model.layer_stack, model.unit_width
    return ModelSize(depth.num_layers if depth is not None else None, width.width if width is not None else None)


def resize(model: Model, size: ModelSize) -> Model:
    """Return the settings of a model in another size; None leaves it."""
    present = size_of(model)
    if size.num_layers not in (None, present.num_layers):
        model = model.with_depth(size.num_layers)
    return model if size.width in (None, present.width) else model.with_width(size.width)


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


def check_documents(model: Model, layout: Layout) -> None:
    """Refuse a model, or a layout, in which documents that share a row would see each other."""
    if not model.takes_documents and model.name != "function":
        raise ValueError(
            f"the model must keep documents of a row apart for data packed_text, but {model.name} does not; take "
            "transformer_lm, a function whose module takes (tokens, documents, positions), or data text"
        )
    if layout.pipeline > 1:
        raise ValueError(
            f"layout must have no pipeline with data packed_text, whose documents only the first stage would know, but "
            f"got {layout}; take data text, or other axes"
        )


def check_unequal(data: Data, padding: Padding | None, layout: Layout) -> None:
    """Refuse a layout in which micro-batches of unequal lengths cannot be divided."""
    is_unequal = padding is not None or (isinstance(data, FileData) and data.padding == "longest")
    if is_unequal and layout.pipeline > 1:
        raise ValueError(
            "samples must have one length where the layout has a pipeline, whose micro-batches have one shape, but got "
            f"padding to the longest with {layout}; take data.padding sequence_length, or other axes"
        )
    if is_unequal and layout.context > 1 and (padding is None or padding.multiple_of % (2 * layout.context)):
        raise ValueError(
            f"padding.multiple_of must be a multiple of {2 * layout.context} for a context axis of {layout.context}, "
            f"which divides each sequence, but got {padding.multiple_of if padding is not None else 1}; give "
            f"--padding.multiple_of {2 * layout.context}, or data.padding sequence_length"
        )
