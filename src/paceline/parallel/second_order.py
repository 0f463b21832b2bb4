"""Gradients of gradients, and transforms, over exchanges that torch differentiates once, by backward: refused."""

from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import SettingsError
from paceline.topology.layout import Layout


def differentiated_once(value: Tensor, axis: str) -> Tensor:
    """Return a result of an exchange, or of a block whose parameters were gathered.

    Its backward raises `SettingsError` under ``create_graph=True``, as gradient penalties and higher orders need.

    Args:
        value: Tensor whose gradient passes through the exchange.
        axis: Axis of the exchange.
    """
    if value.requires_grad and not torch.compiler.is_compiling():  # compiled blocks refuse it themselves
        value.register_hook(_REFUSALS[axis])
    return value


def refuse_transforms(module: nn.Module, layout: Layout) -> None:
    """Let calls of a module inside transforms of `torch.func` raise `SettingsError` where torch fails in them."""
    sizes = {"tensor": layout.tensor, "expert": layout.expert, "sharded": 2 if layout.shards_parameters else 1}
    axis = next((axis for axis, size in sizes.items() if size > 1), None)
    if axis is None:
        return

    def refuse(_module: nn.Module, _inputs: Any) -> None:
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
            raise SettingsError(
                f"a model must not run inside torch.func (vjp, jvp, grad) over the {axis} axis, whose exchanges are "
                f"unknown to it; take torch.autograd.grad, or set Layout({_REFUSALS[axis].advice}), where it is exact"
            )

    module.register_forward_pre_hook(refuse, prepend=True)


class _Refusal:
    def __init__(self, axis: str) -> None:
        self._axis = axis
        self.advice = "zero_stage=1" if axis == "sharded" else f"{axis}=1"

    def __call__(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled():  # backward runs so if its results are to be differentiated
            raise SettingsError(
                f"gradients must be taken once over the {self._axis} axis, whose exchanges torch does not "
                "differentiate again, but a loss takes gradients with create_graph=True, as gradient penalties do; set "
                f"Layout({self.advice}), where they are exact"
            )


_REFUSALS = {axis: _Refusal(axis) for axis in ("tensor", "sharded", "context", "expert")}
