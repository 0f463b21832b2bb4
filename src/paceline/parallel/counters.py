"""Numbers that each forward of a module moves, such as counts of steps: what a model does later may hang on them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.trial import restored

NUM_LATER = 1000
"""Number of forwards after which a number that each changes is tried."""

Numbers = Sequence[tuple[dict[str, Any], str, Any]]
"""Attributes and buffers that are numbers: their holder, name and value."""


def find_counters(module: nn.Module, run: Callable[[], Any]) -> Numbers:
    """Return the numbers that each forward moves, with what they will be after many.

    Args:
        module: Module, which is afterwards as before.
        run: Function that runs it forward.
    """
    before = _list_numbers(module)
    with restored(module), torch.no_grad():
        run()
        after: dict[tuple[int, str], Any] = {(id(holder), key): value for holder, key, value in _list_numbers(module)}
    moved: list[tuple[dict[str, Any], str, Any]] = []
    for holder, key, value in before:
        now: Any = after.get((id(holder), key), value)
        if type(now) is not type(value) or now == value:
            continue
        later = value + NUM_LATER * (now - value)
        moved.append((holder, key, _fill(held, later) if isinstance(held := holder[key], Tensor) else later))
    return moved


def set_numbers(numbers: Numbers) -> None:
    """Give attributes and buffers their values, inside of `restored`; tensors are copied."""
    for holder, key, value in numbers:
        holder[key] = value.clone() if isinstance(value, Tensor) else value


def _fill(like: Tensor, number: float) -> Tensor:
    """Return a tensor like another one that holds a number, or the nearest to it of its dtype: many hold a flag."""
    if like.dtype == torch.bool:
        return torch.full_like(like, number > 0)
    limits = torch.finfo(like.dtype) if like.is_floating_point() else torch.iinfo(like.dtype)
    return torch.full_like(like, min(max(number, limits.min), limits.max))


def _list_numbers(module: nn.Module) -> Numbers:
    """Return attributes that are numbers, and whole numbers that tensors of one element hold."""
    numbers: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():
        for holder in (vars(part), part._buffers):
            for key, value in holder.items():
                if type(value) in (int, float):
                    numbers.append((holder, key, value))
                elif isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() and not value.is_meta:
                    number = float(value.detach())
                    if number.is_integer():  # others may be statistics, which do not grow for ever
                        numbers.append((holder, key, number))
    return numbers
