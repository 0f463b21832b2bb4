"""Reading a number of a tensor of which this rank has a part: refused, since torch reads that of the part."""

import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from paceline.errors import SettingsError


def refuse_reads_of_parts() -> None:
    """Let `float(x)`, `x.item()` and `if x > y:` raise where the number is not the same on all ranks.

    Torch would give each rank that of its part: a sum of its entries in a norm, or another branch on each rank.
    """
    # Torch has no public way to say what an operation does with a DTensor.
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _read


def _find_optimizer() -> str:
    """Return the class of the optimizer that is stepping; empty if none is."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(owner := frame.f_locals.get("self"), torch.optim.Optimizer):
            return type(owner).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _read(op_call: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    value = args[0]
    assert isinstance(value, DTensor)
    names = value.device_mesh.mesh_dim_names or ("",) * value.device_mesh.ndim
    for name, size, placement in zip(names, value.device_mesh.shape, value.placements, strict=True):
        if size > 1 and not placement.is_replicate():
            if optimizer := _find_optimizer():
                raise SettingsError(
                    f"an optimizer must step each element by itself where ranks have parts of parameters, but "
                    f"{optimizer} reads a number that is made of all of one, over {name}({size}); take another one, "
                    f"such as AdamW, or set {'Layout(zero_stage=1)' if name == 'sharded' else f'Layout({name}=1)'}"
                )
            raise SettingsError(
                "float(), item() and conditions must be of all of a tensor, but this DTensor has a part of it, or one "
                f"of the summands, over {name}({size}): {placement}; write x.full_tensor() for x, on every rank"
            )
    return value._local_tensor.item()
