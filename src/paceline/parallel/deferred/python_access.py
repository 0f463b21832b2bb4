"""What Python code asks of tensors past torch's operators: addresses, texts, foreign views, the generator's state."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.deferred.generator import GENERATOR
from paceline.parallel.deferred.recording import Recording
from paceline.parallel.deferred.refusal import UndeferrableError

_ADDRESS = "it asks for the address of a tensor's memory"
_LIBRARY = "it hands a tensor to another library (DLPack)"
_MEMORY = "it reads or writes a tensor's memory past torch's operators"
_ASKS: dict[tuple[Any, str], str] = {
    **{(owner, "data_ptr"): _ADDRESS for owner in (Tensor, torch.UntypedStorage, torch.TypedStorage)},
    (Tensor, "const_data_ptr"): _ADDRESS,
    (Tensor, "__repr__"): "it makes a text of a tensor's values",
    (Tensor, "numpy"): "it asks for a NumPy array of a tensor",
    **dict.fromkeys(((Tensor, "__dlpack__"), (torch, "to_dlpack")), _LIBRARY),
    (torch.utils.dlpack, "to_dlpack"): _LIBRARY,
    **{(Tensor, name): _MEMORY for name in ("share_memory_", "pin_memory", "apply_", "map_", "map2_")},
    **{
        (torch.UntypedStorage, name): _MEMORY
        for name in (
            *("__getitem__", "__setitem__", "__reduce__", "_byteswap", "_set_from_file", "_share_fd_cpu_", "new"),
            *(
                "_share_filename_cpu_",
                "_write_file",
                "copy_",
                "cpu",
                "fill_",
                "pin_memory",
                "resizable",
                "resize_",
                "tolist",
            ),
            "_swap_data_ptr_",
        )
    },
}
"""Reasons why a model must be built whole whose construction calls a function on what has no values."""


_ALONE = 2
"""References to an object that only a name and a question about it hold."""

_DRAWS_IN_PLACE = (
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_",
)  # fmt: skip
_DRAWS = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial")
"""Operators that may be given a generator."""


@contextmanager
def watching_python(recording: Recording) -> Iterator[None]:
    """While active, refuse what tensors without values cannot answer, and settle the generator for who reads it."""

    def refuse(real: Callable[..., Any], reason: str) -> Callable[..., Any]:
        def ask(asked: Any, *args: Any, **kwargs: Any) -> Any:
            if recording.knows(getattr(asked, "_untyped_storage", asked)):
                with recording.watch(real.__name__):
                    raise UndeferrableError(reason)
            return real(asked, *args, **kwargs)

        return ask

    def list_values(asked: Tensor) -> Any:
        return to_list(recording.with_values(asked))

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return recording.copy_storage(storage) if recording.knows(storage) else copy(storage)

    def draw(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("generator") is generator:  # which is the one that is taken without a name
                kwargs = {**kwargs, "generator": None}
            return real(*args, **kwargs)

        return run

    generator = _Settling(recording)
    to_list = Tensor.tolist
    copy: Callable[[torch.UntypedStorage], torch.UntypedStorage] = torch.UntypedStorage.clone
    with ExitStack() as changed:
        for (owner, name), reason in _ASKS.items():
            changed.enter_context(replaced(owner, name, refuse(getattr(owner, name), reason)))
        changed.enter_context(replaced(Tensor, "tolist", list_values))
        for owner, name in [*((Tensor, name) for name in _DRAWS_IN_PLACE), *((torch, name) for name in _DRAWS)]:
            changed.enter_context(replaced(owner, name, draw(getattr(owner, name))))
        changed.enter_context(replaced(torch.UntypedStorage, "clone", clone))
        for module in (torch, torch.random, torch._C):
            changed.enter_context(replaced(module, "default_generator", generator))
        yield
    gc.collect()
    if sys.getrefcount(generator) > _ALONE:
        with recording.watch("generator"):
            raise UndeferrableError("it keeps torch's generator")


class _Settling:
    """Torch's generator for code that asks it for its state, which it then really has.

    It is no generator: operators are given none in its place.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        found = getattr(GENERATOR, name)

        def ask(*args: Any, **kwargs: Any) -> Any:
            if name not in ("manual_seed", "seed", "set_state"):
                self._recording.settle()
            result = found(*args, **kwargs)
            return self if result is GENERATOR else result

        return ask if callable(found) else found


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
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
