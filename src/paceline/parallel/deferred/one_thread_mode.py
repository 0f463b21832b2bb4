"""Torch's mode of tensors without memory, for the thread that records what is done with them."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.parallel.deferred.refusal import UndeferrableError


class OneThreadMode(FakeTensorMode):
    """Torch's mode of tensors without memory, which refuses what another thread does with them: nobody records it.

    Args:
        watch: Context, for an operator, that notes what is raised inside.
    """

    def __init__(self, watch: Callable[[Any], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._watch, self._thread = watch, threading.get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip Dynamo, torch would import it first, which takes a second

    def __deepcopy__(self, memo: dict[int, Any]) -> "OneThreadMode":
        return self  # copies of its tensors are its own, too

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation without values."""
        if threading.get_ident() != self._thread:
            with self._watch(func):
                raise UndeferrableError("another thread works on its tensors")
        return super().__torch_dispatch__(func, types, args, kwargs)
