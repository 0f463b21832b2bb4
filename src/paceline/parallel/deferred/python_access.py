"""What Python code asks of tensors past torch's operators: addresses, texts, foreign views, the generator's state."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from paceline.parallel.deferred.recording import Recording
from paceline.parallel.deferred.refusal import UndeferrableError

_ASKS = {
    (Tensor, "data_ptr"): "it asks for the address of a tensor's memory",
    (torch.UntypedStorage, "data_ptr"): "it asks for the address of a tensor's memory",
    (torch.TypedStorage, "data_ptr"): "it asks for the address of a tensor's memory",
    (Tensor, "__dlpack__"): "it hands a tensor to another library (DLPack)",
    (Tensor, "__repr__"): "it makes a text of a tensor's values",
}
"""Reasons why a model must be built whole whose construction calls a method on a tensor without values."""


@contextmanager
def watching_python(recording: Recording) -> Iterator[None]:
    """While active, refuse what tensors without values cannot answer, and settle the generator for who reads it."""

    def refuse(real: Callable[..., Any], reason: str) -> Callable[..., Any]:
        def ask(asked: Any, *args: Any, **kwargs: Any) -> Any:
            is_empty = isinstance(asked, FakeTensor) or (not isinstance(asked, Tensor) and asked.device.type == "meta")
            is_for_torch = real.__name__ == "data_ptr" and _asker().startswith("torch.")  # which only copies a tensor
            if is_empty and not is_for_torch:
                with recording.watch(real.__name__):
                    raise UndeferrableError(reason)
            return real(asked, *args, **kwargs)

        return ask

    def settle(real: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def read() -> Tensor:
            recording.settle()
            return real()

        return read

    with ExitStack() as changed:
        for (owner, name), reason in _ASKS.items():
            changed.enter_context(_replaced(owner, name, refuse(getattr(owner, name), reason)))
        for module in (torch, torch.random):
            changed.enter_context(_replaced(module, "get_rng_state", settle(module.get_rng_state)))
        yield


def _asker() -> str:
    """Return the name of the module whose code calls the caller's caller."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While active, an attribute has another value; one that was inherited is inherited again."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
