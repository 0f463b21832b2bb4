"""Attributes of the module that are read of what is called in its place, such as a replica."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn


def find_attribute(owner: object, name: str, run: Callable[..., Any], *, is_late: bool = False) -> Any:
    """Return the public attribute `name` of the ``module`` of `owner`, which has none of that name itself.

    Args:
        owner: Object that is called in place of its module.
        name: Name of the attribute.
        run: Function that calls a function as `owner` calls forward, such as in its precision. The methods that the
            module's class adds to `nn.Module` run in it.
        is_late: Whether parameters may wait for their last update, so that only forward may read them.

    Raises:
        AttributeError: The module has no such attribute, or only forward may use it.
    """
    module = vars(owner).get("module")
    if module is None or name.startswith("_"):  # also while `owner` is made or copied
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")
    if name == "forward":
        raise AttributeError(f"forward of the {type(owner).__name__} must be run by calling it; write replica(...)")
    found = getattr(module, name)
    is_method = getattr(found, "__self__", None) is module
    if is_late and (is_method or isinstance(found, Tensor | nn.Module)):
        raise AttributeError(
            f"{name} must be read of the module itself where buckets are applied in the next forward, which may still "
            f"have to update it; call replica.flush(), then take replica.module.{name}"
        )
    return partial(run, found) if is_method and name not in dir(nn.Module) else found
