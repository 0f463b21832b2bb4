"""Values that other ranks of a pipeline have: what is computed from their placeholders is refused where it counts."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.errors import SettingsError
from paceline.parallel.pipeline.draws import SharedDraws, draws

_METADATA = {
    "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "__len__", "is_contiguous",
    "get_device", "is_floating_point", "is_complex", "data_ptr", "storage_offset", "untyped_storage",
    "type", "__hash__", "__get__", "register_hook", "requires_grad_",
    "result_type", "can_cast", "backward", "is_same_size", "__repr__", "__format__",
}  # fmt: skip
"""Functions that read no values of a tensor, or return tensors."""
_LEAVES = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types of what functions take beside tensors."""

_sources: Any = WeakTensorKeyDictionary()
"""Names of what is missing, of each tensor that holds no values or was computed from such."""


class Tracking(TorchFunctionMode):
    """Mode in which results of functions of torch are known to be missing what their arguments are."""

    def __init__(self) -> None:
        super().__init__()
        self.unhooked: list[Tensor] = []
        """Tensors that get no hooks: the rank that made them has run the same line."""
        self._draws: SharedDraws | None = None
        self._is_paused = False

    def share_draws(self, seed: int, device: torch.device) -> int:
        """Let what is drawn from now on be the same wherever the seed, which is returned, is the same."""
        self._draws = SharedDraws(seed, device)
        return seed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        if func is Tensor.register_hook and not self._is_paused and any(args[0] is one for one in self.unhooked):
            return RemovableHandle(OrderedDict())
        source = None if self._is_paused else find_missing((args, kwargs))
        if self._draws is not None and not self._is_paused and draws(func, kwargs):
            result = self._draws.call(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if source is None:
            return result
        if reads_values(func, result):
            raise SettingsError(
                "a model run as a pipeline must decide the same way as on the sample, but it reads numbers that come "
                f"from {source}; {ADVICE}"
            )
        for tensor in list_changed(func, args, kwargs, result):
            mark_missing(tensor, source)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While active, functions of torch run as without the mode."""
        is_last = _get_current_function_mode() is self
        self._is_paused = True
        try:
            with _pop_mode_temporarily() if is_last else nullcontext():
                yield
        finally:
            self._is_paused = False


_losses: list[int] = []
"""One entry while a loss is computed."""


@contextmanager
def computing_loss() -> Iterator[None]:
    """While active, the module's parts are not listed: those of other ranks would be left out without a word."""
    _losses.append(1)
    try:
        yield
    finally:
        _losses.pop()


def check_listing(place: str) -> None:
    """Raise `SettingsError` if a loss lists modules or parameters, of which that at `place` is on another rank."""
    if _losses:
        raise SettingsError(
            f"the loss of a pipeline must use what its last stage has, but it lists the model's parts, of which "
            f"{place} is on another rank; leave penalties on parameters to the optimizer (weight_decay), or set "
            "Layout(pipeline=1) (--layout.pipeline 1)"
        )


ADVICE = (
    "give parallelize a sample on which the model does what it does in training, or set Layout(pipeline=1) "
    "(--layout.pipeline 1)"
)
"""Advice for a model that needs what its stage has not got."""


def mark_missing(tensor: Tensor, source: str) -> None:
    """Record that a tensor, or the one that it is a view of, holds no values."""
    _sources[tensor] = source
    if tensor._base is not None:
        _sources[tensor._base] = source


class AbsentTensor(Tensor):
    """Placeholder of a parameter that another rank has, which ignores what a training loop writes to it.

    What is drawn for it is drawn, so that the generator is where it is in one process.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch: its results are plain tensors, without numbers."""
        kwargs = dict(kwargs or {})
        if not args and "tensor" in kwargs:  # as torch.nn.init calls it
            args = (kwargs.pop("tensor"),)
        with torch._C.DisableTorchFunctionSubclass():
            if not args or not isinstance(args[0], AbsentTensor):
                return func(*args, **kwargs)
            if list_written(func, args):
                if draws(func, kwargs) or getattr(func, "__module__", "") == init.__name__:
                    func(torch.empty_like(args[0]), *args[1:], **kwargs)
                return args[0]
            result = func(*args, **kwargs)
            return _make_absent(result, _sources[args[0]]) if func in _SAME else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a placeholder of its own, such as an average of models has."""
        made = memo[id(self)] = _make_absent(self, _sources[self])
        return made


_SAME = (Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]
"""Functions whose results a loop writes to in the place of a parameter."""


def make_absent(tensor: Tensor, name: str) -> Tensor:
    """Return a placeholder of a parameter or buffer, by its name, in a few bytes; numbers computed from it are NaN."""
    return _make_absent(tensor, f"{name}, which only another stage has")


def _make_absent(tensor: Tensor, source: str) -> Tensor:
    value = float("nan") if tensor.is_floating_point() else 0
    made = torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    if type(made) is Tensor:  # not in a rehearsal, where nobody writes
        made = made.as_subclass(AbsentTensor)
    mark_missing(made, source)
    return made


def find_missing(data: Any) -> str | None:
    """Return what the first tensor of `data` without values is missing, or None."""
    return _find_missing([data]) if _sources else None


def _find_missing(values: Iterable[Any]) -> str | None:
    """Search values one by one: most are tensors or numbers, on which `tree_leaves` spends more than their function."""
    for value in values:
        if isinstance(value, Tensor):
            source = _sources.get(value)
        elif isinstance(value, list | tuple):
            source = _find_missing(value)
        elif isinstance(value, dict):
            source = _find_missing(value.values())
        else:
            source = None if isinstance(value, _LEAVES) else _find_missing(list_tensors(value))
        if source is not None:
            return source  # type: ignore[no-any-return]
    return None


def reads_values(func: Any, result: Any) -> bool:
    """Return whether a function of torch has made numbers, or a decision, of its arguments."""
    return result is not None and not list_tensors(result) and getattr(func, "__name__", "") not in _METADATA


def list_changed(func: Any, args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """Return the tensors that a function of torch has made or changed."""
    changed = [*list_tensors(result), *list_written(func, args)]
    return [*changed, *list_tensors(kwargs["out"])] if "out" in kwargs else changed


def list_tensors(data: Any) -> list[Tensor]:
    """Return the tensors in any nesting that torch knows."""
    return [value for value in tree_leaves(data) if isinstance(value, Tensor)]


def list_written(func: Any, args: Any) -> list[Tensor]:
    """Return the tensors that a function of torch changes in place, but for ``out``."""
    name = getattr(func, "__name__", "")
    is_written = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    return list_tensors(args[:1]) if is_written else []
