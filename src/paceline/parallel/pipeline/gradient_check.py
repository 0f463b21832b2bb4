"""What a model that runs part by part computes, compared with the whole one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.batch import list_tensors

_RELATIVE = 1e-3
"""Largest difference, as a part of a parameter's largest gradient, for sums in another order."""
_ABSOLUTE = 1e-6
"""The same, as a part of the largest of all gradients, for what cancels."""


def find_wrong_gradient(
    module: nn.Module, run_whole: Callable[[], Any], runs: Sequence[Callable[[Any], Any]], inputs: tuple[Tensor, ...]
) -> str:
    """Return a sentence's part about the first parameter whose gradient is another part by part; empty if none is.

    Gradients of the parts are taken off those of the whole model, which takes the memory of gradients once.

    Args:
        module: Model, whose gradients are kept.
        run_whole: Function that returns the model's output, a nesting of tensors.
        runs: Parts, each from a tuple of tensors to that of the next one; the last returns the output.
        inputs: Value of the first part.
    """
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    kept = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.grad = None
        with torch.enable_grad():
            outputs = list_tensors(run_whole())
            if not any(one.requires_grad for one in outputs):
                return ""
            generator = torch.Generator().manual_seed(0)
            cotangents = [torch.randn(one.shape, generator=generator).to(one) for one in outputs]
            _backward(outputs, cotangents)
            sizes = {name: _size(parameter.grad) for name, parameter in parameters.items()}
            _run_backward(runs, inputs, [-one for one in cotangents])
        largest = max(sizes.values())
        for name, parameter in parameters.items():
            relative, absolute = (max(part, 8 * torch.finfo(parameter.dtype).eps) for part in (_RELATIVE, _ABSOLUTE))
            difference = _size(parameter.grad)
            if not difference <= relative * sizes[name] + absolute * largest:
                return f"a gradient of {name} that differs by {difference / max(sizes[name], 1e-30):.1e} of its size"
        return ""
    finally:
        for name, parameter in parameters.items():
            parameter.grad = kept[name]


def _run_backward(
    runs: Sequence[Callable[[Any], Any]], inputs: tuple[Tensor, ...], cotangents: Sequence[Tensor]
) -> None:
    """Run parts forward and backward, as ranks of a pipeline do that send each other values and gradients."""
    value, steps = inputs, []
    for run in runs:
        received = tuple(one.detach().requires_grad_(one.requires_grad) for one in value)
        value = tuple(list_tensors(run(tuple(one.clone() for one in received))))  # a part may change them in place
        steps.append((received, value))
    gradients: Sequence[Tensor | None] = cotangents
    for received, value in reversed(steps):
        _backward(value, gradients)
        gradients = [one.grad for one in received]


def _backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run backward from the outputs that take part in it."""
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad and pair[1] is not None]
    torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])


def _size(gradient: Tensor | None) -> float:
    return float(gradient.detach().abs().max()) if gradient is not None and gradient.numel() else 0.0


def pair_up(made: Any, whole: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of two outputs, as numbers."""

    def count(one: Tensor) -> Tensor:
        return (torch.view_as_real(one.resolve_conj()) if one.is_complex() else one).double()

    return [(count(one), count(other)) for one, other in zip(list_tensors(made), list_tensors(whole), strict=True)]
