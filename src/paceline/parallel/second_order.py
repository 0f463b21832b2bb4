"""Gradients of gradients over exchanges that torch differentiates once: refused, since torch makes wrong ones."""

import torch
from torch import Tensor

from paceline.errors import SettingsError


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


class _Refusal:
    def __init__(self, axis: str) -> None:
        self._axis = axis

    def __call__(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled():  # backward runs so if its results are to be differentiated
            advice = "zero_stage=1" if self._axis == "sharded" else f"{self._axis}=1"
            raise SettingsError(
                f"gradients must be taken once over the {self._axis} axis, whose exchanges torch does not "
                "differentiate again, but a loss takes gradients with create_graph=True, as gradient penalties do; set "
                f"Layout({advice}), where they are exact"
            )


_REFUSALS = {axis: _Refusal(axis) for axis in ("tensor", "sharded", "context", "expert")}
