"""One stage of a model: some of its layers, run one after the other."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from paceline.data.batch import list_tensors, map_tensors
from paceline.parallel.own_forward import running_forward
from paceline.parallel.pipeline.layers import PipelineLayer, find_modules, find_owned
from paceline.parallel.pipeline.traced import join_parts, list_gradients

Value = Tensor | tuple[Tensor, ...]
"""Value between two layers."""


class Stage(nn.Module):
    """Consecutive layers of a model, under their names in the model; it holds no copies.

    Args:
        model: Model that the layers belong to.
        layers: Layers of the stage.
        index: Index of the stage among those of the model.
        splits_backward: Whether torch will compute gradients of weights separately from those of inputs.
        is_last: Whether the stage returns the model's output: any nesting of tensors, see `rebuild`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[PipelineLayer],
        index: int,
        *,
        splits_backward: bool,
        is_last: bool = False,
    ) -> None:
        super().__init__()
        self.layers = list(layers)
        self.index = index
        self._functions = join_parts(self.layers)
        self._splits_backward = splits_backward
        self._is_last = is_last
        self._output: Any = None
        self._model = (model,)  # in a tuple: as a submodule it would make all of the model part of the stage
        for name, module in find_modules(model, layers).items():
            self.add_module(name.replace(".", "_"), module)
        first = find_modules(model, layers[:1]).values()
        self._begins_in_place = any(getattr(one, "inplace", False) for module in first for one in module.modules())

    @property
    def model(self) -> nn.Module:
        """Model that the layers belong to."""
        return self._model[0]

    def forward(self, *values: Tensor) -> Value:
        """Return the output of the last layer; of the model's own output, the tensors."""
        value: Value = values[0] if len(values) == 1 else values
        if self._begins_in_place:
            value = _each(value, lambda one: one.clone())  # autograd forbids changing a received tensor
        with running_forward():  # layers may be functions of the model's own
            for run in self._functions:
                value = run(value)
        if self._is_last:
            self._output = value
            tensors = tuple(self._sendable(one, values) for one in list_tensors(value))
            return tensors[0] if len(tensors) == 1 else tensors
        return _each(value, lambda one: self._sendable(one, values))

    def rebuild(self, value: Value) -> Any:
        """Return the model's output, as it was nested, from the tensors that the last forward has returned."""
        tensors = iter(as_tuple(value))
        output, self._output = self._output, None
        return map_tensors(lambda _: next(tensors), output) if self._is_last else value

    def list_gradients(self, output: Value, has_input_gradient: bool) -> tuple[bool, ...]:
        """Return for each tensor of an output whether a gradient comes back for it."""
        gives = has_input_gradient or any(parameter.requires_grad for parameter in self.parameters())
        return list_gradients(self._functions[-1], as_tuple(output), gives)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Yield the layers' present parameters, also if the model has replaced them since the split."""
        owned = find_owned(self.model, self.layers)
        yield from (parameter for parameter in self.model.parameters() if parameter in owned)

    def _sendable(self, output: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        # A split backward detaches outputs in place, which views and inputs must not be.
        is_shared = output._base is not None or any(output is one for one in inputs)
        return output.clone() if self._splits_backward and is_shared else output.contiguous()


def as_tuple(value: Value) -> tuple[Tensor, ...]:
    """Return the tensors of a value."""
    return (value,) if isinstance(value, Tensor) else value


def _each(value: Value, change: Any) -> Value:
    return change(value) if isinstance(value, Tensor) else tuple(change(one) for one in value)
