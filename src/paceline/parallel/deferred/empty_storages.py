"""Tensors that are torch's own in all that can be asked of them, but whose storages have no memory."""

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.parallel.deferred.refusal import UndeferrableError

_CPU, _META = torch.device("cpu"), torch.device("meta")


class EmptyStorages:
    """The storages without memory of one construction.

    A tensor of them has no class and no device of its own by which code could tell it from one with values: torch
    itself raises where its memory is touched. Shapes of results are found by torch's mode of fake tensors, which nobody
    else sees.
    """

    def __init__(self) -> None:
        self._shapes = _ShapesMode()
        self._storages: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}
        self._keys: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        """Bytes of each storage, by key, in the order in which they were made."""

    def knows(self, held: Any) -> bool:
        """Whether a tensor, or a storage, is one of these."""
        if isinstance(held, Tensor):
            return held.layout is torch.strided and torch._C._has_storage(held) and key_of(held) in self.sizes
        return isinstance(held, torch.UntypedStorage) and held._cdata in self.sizes

    def is_held(self) -> bool:
        """Whether anybody else holds one of the storages."""
        return any(True for _ in self._list_held())

    def list_held(self) -> set[int]:
        """Return the keys of the storages that anybody else holds."""
        return {key_of(view) for view in self._list_held()}

    def fill(self, values: Mapping[int, torch.UntypedStorage]) -> bool:
        """Put tensors that are still held into storages with values, and return whether that has been all.

        A storage that was without memory could be read then, but never be written to.
        """
        own = {id(view) for view, _ in self._storages.values()}
        for one in gc.get_objects():
            if issubclass(type(one), Tensor) and id(one) not in own and self.knows(one):
                with torch.no_grad():
                    one.set_(values[key_of(one)], one.storage_offset(), one.shape, one.stride())
        return not self.is_held()

    def release(self) -> None:
        """Give what is still held some memory, so that to read it is no end of all."""
        for view in self._list_held():
            storage = view.untyped_storage()
            storage._swap_data_ptr_(torch.UntypedStorage(storage.nbytes()))  # type: ignore[attr-defined]

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[int]]:
        """Run an operation for the shapes of what it makes.

        Returns:
            The results, without memory; and the places among them of those in storages of their own.
        """
        leaves, structure = tree_flatten((args, kwargs))
        given = {id(leaf): self._imitate(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        real = {id(given[id(leaf)]): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        args, kwargs = tree_unflatten([given.get(id(leaf), leaf) for leaf in leaves], structure)
        with self._shapes:
            results, form = tree_flatten(func(*args, **kwargs))
        self._shapes.fake_tensor_converter.tensor_memo.clear()
        if any(given[key].shape != leaf.shape for leaf in leaves if isinstance(leaf, Tensor) for key in [id(leaf)]):
            raise UndeferrableError(f"the operator {func} resizes a tensor")
        new: list[int] = []
        made = [real[id(one)] if id(one) in real else self._make(one, place, new) for place, one in enumerate(results)]
        return tree_unflatten(made, form), new

    def make_like(self, results: Any) -> tuple[Any, list[int]]:
        """Return tensors without memory like those with values, as `run` does."""
        leaves, form = tree_flatten(results)
        new: list[int] = []
        with self._shapes:
            leaves = [_imitate_values(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tree_unflatten([self._make(one, place, new) for place, one in enumerate(leaves)], form), new

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the bytes of a storage."""
        return self._storages[storage._cdata][0]

    def _imitate(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor in place of one that an operation is given."""
        if not self.knows(tensor):
            with self._shapes:
                return _imitate_values(tensor)
        storage = self._storages[key_of(tensor)][1]
        view = torch.empty(0, dtype=tensor.dtype, device=_META)
        view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return FakeTensor(self._shapes, view, _CPU)

    def _make(self, fake: Any, place: int, new: list[int]) -> Any:
        """Return what takes the place of a fake result; note its place if it is in a storage of its own."""
        if not isinstance(fake, Tensor):
            return fake
        if fake.layout is not torch.strided:
            raise UndeferrableError(f"it makes a tensor of the layout {fake.layout}")
        shadow = fake.untyped_storage()
        if shadow._cdata not in self._keys:
            self._keep(shadow)
            new.append(place)
        storage = self._storages[self._keys[shadow._cdata]][0].untyped_storage()
        made = torch.empty(0, dtype=fake.dtype, device=_CPU)
        made.set_(storage, fake.storage_offset(), fake.shape, fake.stride())
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    def _keep(self, shadow: torch.UntypedStorage) -> None:
        """Make a storage beside a fake one. Both are kept, so that no other takes the place that identifies them."""
        view = _make_bytes(shadow.nbytes())
        self._storages[key_of(view)] = view, shadow
        self._keys[shadow._cdata] = key_of(view)
        self.sizes[key_of(view)] = shadow.nbytes()

    def _list_held(self) -> Iterator[Tensor]:
        """Yield views of the storages that are held by more than these views."""
        alone = _count_holders(_make_bytes(1))
        return (view for view, _ in self._storages.values() if _count_holders(view) != alone)


class _ShapesMode(FakeTensorMode):
    """Torch's mode of tensors that have shapes only."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip Dynamo, torch would import it first, which takes a second


def key_of(tensor: Tensor) -> int:
    """Return the number that identifies a tensor's storage while it is kept."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _make_bytes(num_bytes: int) -> Tensor:
    """Return a tensor of bytes without memory."""
    storage = torch._C._construct_storage_from_data_pointer(0, _CPU, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=_CPU).set_(storage)


def _count_holders(view: Tensor) -> tuple[int, int]:
    """Return how many objects of C++ and of Python hold the storage of a tensor."""
    storage = view.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _imitate_values(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
