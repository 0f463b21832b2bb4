"""What a block of a model keeps from one forward to the next, so that a forward can be run again as it was."""

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.errors import SettingsError

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
"""Attributes in which torch keeps a module's parameters, children and hooks."""
_COLLECTIONS = (list, dict, set, deque, OrderedDict, defaultdict)
_ABSENT: Any = object()
_ALIGNMENT = 16
_Slot = tuple[int, str]
"""Identity of the dict in which a module has a value, and the key there."""


class _Generator(NamedTuple):
    """A generator of random numbers, and its state."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    state: Any


class _FoundState(NamedTuple):
    """A value as a forward found it."""

    value: Any = _ABSENT
    version: int = 0
    kept: Any = _ABSENT
    """Copy of it; the value itself where nobody sees whether it changes."""


class BlockState:
    """The buffers, attributes and generators that one forward of a block changed, as it found them.

    The second run gets copies of them, so that it computes what the first did (spectral norm's vectors move on with
    each run), and leaves the values themselves as they are. Copies, rather than the buffers with other contents: what
    autograd saves in the second run must not change when that ends. Torch's own generators are torch's to keep.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._holders: list[tuple[dict[str, Any], bool]] = []
        """Dicts in which its modules have values; whether they are buffers."""
        self._before: dict[_Slot, Any] = {}
        self._generators: list[_Generator] = []
        self._moved: list[nn.Parameter] = []
        self._has_changed = False

    @contextmanager
    def recorded(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Enter `context`, and keep a copy of each value and generator that changes until its end."""
        modules = [*self._block.modules()]
        for module in modules:
            self._holders += (module._buffers, True), (vars(module), False)
        found = _keep(self._read())
        generators = [*_list_generators(one.value for one in found.values())]
        parameters = [one for module in modules for one in module._parameters.values() if one is not None]
        versions = [(parameter, _version(parameter)) for parameter in parameters]
        with context:
            yield
        now = self._read()
        buffers = {id(holder) for holder, is_buffer in self._holders if is_buffer}
        for slot in found.keys() | now.keys():
            before = found.get(slot, _FoundState())
            if _is_other(before, now.get(slot, _ABSENT), slot[0] in buffers):
                self._has_changed = True
                if not _needs_graph(before.value):
                    self._before[slot] = before.kept
        self._generators = [one for one in generators if _mark(one.state) != _mark(one.read())]
        self._moved = [parameter for parameter, version in versions if _version(parameter) != version]

    @contextmanager
    def replayed(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Enter `context` with those copies in their places, and put back what was there.

        Raises:
            SettingsError: A parameter changes with each forward, so that the first one had others.
        """
        now = self._read() if self._has_changed else {}
        drawn = [one._replace(state=one.read()) for one in self._generators]
        moved = [(parameter, parameter.detach().clone()) for parameter in self._moved]
        for slot, again in _keep(self._before).items():  # copies, since a retained graph may be run again
            self._put(slot, again.kept)
        for one in self._generators:
            one.write(one.state)
        try:
            with context:
                yield
        finally:
            for slot in self._read().keys() | now.keys() if self._has_changed else ():
                self._put(slot, now.get(slot, _ABSENT))
            for one in drawn:
                one.write(one.state)
            self._check(moved)  # here, since torch ends the second run by an exception of its own

    def _read(self) -> dict[_Slot, Any]:
        return {
            (id(holder), key): value
            for holder, is_buffer in self._holders
            for key, value in holder.items()
            if is_buffer or key not in _INTERNAL
        }

    def _put(self, slot: _Slot, value: Any) -> None:
        holder, key = next(holder for holder, _ in self._holders if id(holder) == slot[0]), slot[1]
        if value is _ABSENT:
            holder.pop(key, None)
        else:
            holder[key] = value

    def _check(self, moved: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        for parameter, value in moved:
            if not torch.equal(parameter.detach(), value):
                name = next((name for name, one in self._block.named_parameters() if one is parameter), "one")
                raise SettingsError(
                    f"parameters must stay in the forward of a recomputed block, but each run of it changes {name}; "
                    "register it as a buffer, or do not recompute"
                )


def _keep(values: Mapping[_Slot, Any]) -> dict[_Slot, _FoundState]:
    """Return values with copies of those that may change in place; what shares memory has copies that do."""
    copies = _copy([value for value in values.values() if isinstance(value, Tensor) and not value.requires_grad])
    found = {}
    for slot, value in values.items():
        if isinstance(value, Tensor):
            found[slot] = _FoundState(value, _version(value), copies.get(id(value), value))
        else:
            found[slot] = _FoundState(value, 0, copy.copy(value) if type(value) in _COLLECTIONS else value)
    return found


def _copy(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return copies by the tensors' identities."""
    sharing: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta
        key = tensor.untyped_storage()._cdata if is_plain else id(tensor)
        sharing.setdefault(key, {})[id(tensor)] = tensor
    copies = {}
    for views in sharing.values():
        copies.update(
            _copy_views(views) if len(views) > 1 else {key: one.detach().clone() for key, one in views.items()}
        )
    return copies


def _copy_views(views: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return copies of tensors of one storage that share theirs in the same way."""
    begins = {key: view.storage_offset() * view.itemsize for key, view in views.items()}
    lengths = {
        key: sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) + 1
        for key, view in views.items()
    }
    begin = min(begins.values()) // _ALIGNMENT * _ALIGNMENT
    end = max(begins[key] + lengths[key] * view.itemsize for key, view in views.items() if view.numel())
    storage = next(iter(views.values())).untyped_storage()
    device = next(iter(views.values())).device
    content = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, begin, (end - begin,), (1,)).clone()
    return {
        key: torch.empty(0, dtype=view.dtype, device=device).set_(
            content.untyped_storage(), (begins[key] - begin) // view.itemsize, view.shape, view.stride()
        )
        for key, view in views.items()
    }


def _is_other(before: _FoundState, now: Any, is_buffer: bool) -> bool:
    if now is not before.value:
        return True
    if isinstance(now, Tensor):
        return _version(now) != before.version or _may_differ(now, before.kept, is_buffer)
    if type(now) not in _COLLECTIONS:
        return False
    one, other = (
        [*map(id, [*kept, *(kept.values() if isinstance(kept, dict) else [])])] for kept in (now, before.kept)
    )
    return sorted(one) != sorted(other) if isinstance(now, set) else one != other


def _may_differ(tensor: Tensor, before: Tensor, is_buffer: bool) -> bool:
    """Return whether a tensor whose version stayed may have other bits: batch norm and ``.data`` count no change."""
    if tensor is before:
        return False
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or type(tensor) is not Tensor:
        return is_buffer and not tensor.is_meta  # to compare on a GPU, the host would wait
    one, other = (each.detach().contiguous().flatten().view(torch.uint8) for each in (tensor, before))
    return not torch.equal(one, other)


def _needs_graph(value: Any) -> bool:
    """Whether a value is of a graph, which would live on with it: the second run gets what is there by then."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _list_generators(values: Iterable[Any]) -> Iterator[_Generator]:
    """Yield Python's and NumPy's global generators, and those among `values`."""
    yield _Generator(random.getstate, random.setstate, random.getstate())
    yield _of_numpy(np.random)
    for value in {id(value): value for value in values}.values():
        if isinstance(value, torch.Generator):
            yield _Generator(value.get_state, value.set_state, value.get_state())
        elif isinstance(value, np.random.RandomState):
            yield _of_numpy(value)
        elif type(value) is random.Random:
            yield _Generator(value.getstate, value.setstate, value.getstate())
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            yield _Generator(partial(getattr, bits, "state"), partial(setattr, bits, "state"), bits.state)


def _of_numpy(numbers: Any) -> _Generator:
    read = partial(numbers.get_state, legacy=False)
    return _Generator(read, numbers.set_state, read())


def _mark(state: Any) -> Any:
    """Return a generator's state as something that can be compared."""
    if isinstance(state, dict):
        return {key: _mark(value) for key, value in state.items()}
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    return state.tobytes() if isinstance(state, np.ndarray) else state
