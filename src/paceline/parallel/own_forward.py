"""Whether a parameter is read by the forward pass of its model, which runs on parts, or by somebody else.

A split model's forward sees this rank's part of each parameter. A loss that reads the same parameter means all of it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

CALLS = {nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__}
"""Code of the calls of modules."""
_IS_SPLIT = "_paceline_is_split"
"""Attribute of modules that run on parts, also of copies that `copy.deepcopy` makes."""
_running: list[int] = []


def note_split(module: nn.Module) -> None:
    """Record that calls of a module and its parts are forward passes on parts of parameters."""
    for part in module.modules():
        vars(part)[_IS_SPLIT] = True


@contextmanager
def running_forward() -> Iterator[None]:
    """While active, parameters are read by their model."""
    _running.append(1)
    try:
        yield
    finally:
        _running.pop()


def is_in_forward() -> bool:
    """Return whether a split model runs, forward or again for backward, or is compiled."""
    if torch.compiler.is_compiling() or _running or torch._C._current_graph_task_id() != -1:
        return True
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in CALLS and _IS_SPLIT in vars(frame.f_locals["self"]):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
