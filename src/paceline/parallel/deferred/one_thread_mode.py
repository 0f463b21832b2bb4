"""Torch's mode of tensors without memory, for the thread that records what is done with them."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakMethod

from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.parallel.deferred.refusal import UndeferrableError


class OneThreadMode(FakeTensorMode):
    """Torch's mode of tensors without memory, which refuses what another thread does with them: nobody records it.

    Args:
        watch: Method that returns a context, for an operator, that notes what is raised inside. Its owner is not kept:
            it holds this mode, and its memory is free at once when nobody needs it any more.
    """

    def __init__(self, watch: Callable[[Any], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._watch, self._thread = WeakMethod(watch), threading.get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip Dynamo, torch would import it first, which takes a second

    def __deepcopy__(self, memo: dict[int, Any]) -> "OneThreadMode":
        return self  # copies of its tensors are its own, too

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation without values."""
        if threading.get_ident() != self._thread:
            watch = self._watch()
            with watch(func) if watch is not None else nullcontext():
                raise UndeferrableError("another thread works on its tensors")
        return super().__torch_dispatch__(func, types, args, kwargs)
