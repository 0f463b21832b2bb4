"""What a loop of a user's does to parameters of which this rank has a part, between steps: done to all of them.

Torch's DTensors forget what is written to a row that it has gathered (``p[0] *= 0.5``) or by ``p.data = x``, let each
rank draw random numbers of its own, and refuse plain tensors beside them. Every rank must run the same line.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_any, tree_map_only
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from paceline.errors import SettingsError
from paceline.parallel.local import local, local_slice, wrap
from paceline.parallel.own_forward import is_in_forward

_aten = torch.ops.aten
_VIEWS = (
    *(_aten.select.int, _aten.slice.Tensor, _aten.view.default, _aten.diagonal.default, _aten.squeeze.dim),
    *(_aten.unbind.int, _aten.split.Tensor, _aten.split_with_sizes.default),
)
"""Views that torch may make of a gathered copy."""
_BESIDE = (
    *(_aten.copy_.default, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor),
    *(_aten.lerp_.Scalar, _aten.masked_fill_.Scalar, _aten.clamp_.Tensor, _aten.addcmul_.default),
)
"""Changes that may take plain tensors, which are the same on all ranks."""
_COMBINE = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.where.self)
"""Functions that may take plain tensors of the same shape too, where no gradient passes."""
_OF_WHOLE = (
    *(_aten.fill_.Tensor, _aten.index_put_.default, _aten.index_fill_.int_Scalar, _aten.index_copy_.default),
    *(_aten.index_add_.default, _aten.masked_scatter_.default, _aten.scatter_.src, _aten.scatter_.value),
)
"""Changes for which torch would have to gather the tensor."""
_DRAWS = (
    *(_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.exponential_.default),
    *(_aten.log_normal_.default, _aten.cauchy_.default, _aten.geometric_.default),
    *(_aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from")),
)
_DRAWS_LIKE = (
    *(_aten.rand_like.default, _aten.randn_like.default, _aten.bernoulli.default),
    *(_aten.randint_like.default, _aten.randint_like.low_dtype),
)
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _list_handlers() -> dict[Any, Handler]:
    handlers: dict[Any, Handler] = dict.fromkeys(_VIEWS, _make_view)
    handlers |= dict.fromkeys(_BESIDE, _change_beside) | dict.fromkeys(_OF_WHOLE, _change_whole)
    handlers |= dict.fromkeys(_COMBINE, _combine)
    return handlers | dict.fromkeys(_DRAWS, _draw) | dict.fromkeys(_DRAWS_LIKE, _draw_like)


def let_loops_change_parameters() -> None:
    """Let DTensors take changes as whole tensors do, from now on."""
    handlers = _registered()
    handlers.update(_list_handlers())
    DTensor.data = property(_read_data, assign_data)  # type: ignore[assignment]


@contextmanager
def optimizing() -> Iterator[None]:
    """While active, changes of DTensors take no more time than torch's own: an optimizer needs nothing else."""
    handlers = _registered()
    held = {op: handler for op in (*_BESIDE, *_COMBINE) if (handler := handlers.pop(op, None)) is not None}
    try:
        yield
    finally:
        handlers.update(held)


_read: Any = WeakTensorKeyDictionary()
"""Weak references to what ``p.data`` has returned, by the parameter."""


def _read_data(tensor: Tensor, known_as: Tensor | None = None) -> Tensor:
    """Return ``p.data``, which keeps its values when the parameter is given other ones, as in ``old = p.data``."""
    data: Tensor = Tensor.data.__get__(tensor)  # type: ignore[attr-defined]
    key = tensor if known_as is None else known_as
    _read[key] = [*(one for one in _read.get(key, ()) if one() is not None), TensorWeakRef(data)]
    return data


def _part_from(tensor: Tensor) -> None:
    """Give what ``p.data`` has returned memory of its own: that of the parameter is written to."""
    for reference in _read.pop(tensor, ()):
        data = reference()
        if isinstance(data, DTensor):
            data._local_tensor = data._local_tensor.clone()
        elif data is not None:
            data.set_(data.clone())


def assign_data(tensor: Tensor, value: Tensor) -> None:
    """Give a parameter, of which this rank may have a part, the values of a whole tensor or of one like it."""
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise SettingsError(
            f"p.data = x must keep shape and dtype of a parameter where ranks share the model, but got "
            f"{tuple(value.shape)} of {value.dtype} for {tuple(tensor.shape)} of {tensor.dtype}; make the model so "
            "before parallelize"
        )
    with torch.no_grad():
        _part_from(tensor)
        if isinstance(value, DTensor) and isinstance(tensor, DTensor) and value.placements == tensor.placements:
            local(tensor).copy_(local(value))
        else:
            _write(tensor, _whole(value))


class WholeParameter(Tensor):
    """All of a parameter that each rank has all of, as a plain tensor, for code outside of forward.

    What is set on it, such as ``p.data = x``, is set on the parameter.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    parameter: Tensor

    @classmethod
    def of(cls, parameter: DTensor) -> "WholeParameter":
        """Return all of a parameter; losses of it give that its gradient."""
        plain: Any = parameter.to_local()
        if plain.requires_grad:
            plain.retain_grad()  # so that optimizers take it, for which a replica then gives them the parameter
        plain.__class__ = cls  # rather than by an operation of its own, which a graph would show
        whole: WholeParameter = plain
        whole.parameter = parameter
        return whole

    data = property(
        lambda self: _read_data(self, self.parameter), lambda self, value: assign_data(self.parameter, value)
    )
    requires_grad = property(
        lambda self: self.parameter.requires_grad, lambda self, value: self.parameter.requires_grad_(value)
    )

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the parameter."""
        gradient = self.parameter.grad
        return local(gradient) if gradient is not None else None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.parameter.grad = None if value is None else wrap(self.parameter, value)

    def requires_grad_(self, requires_grad: bool = True) -> "WholeParameter":
        """Freeze the parameter, or train it."""
        self.parameter.requires_grad_(requires_grad)
        return self


class _Gathered(DTensor):
    """A view of a gathered copy, which writes to what it is a view of.

    Attributes:
        _source: The DTensor that it is a view of.
        _select: Function that makes the view of all of that.
    """

    _source: DTensor
    _select: Callable[[Tensor], Tensor]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation, and write what it has changed to the source."""
        kwargs = kwargs or {}
        changed = args[0] if func._schema.is_mutable and args and isinstance(args[0], _Gathered) else None
        if changed is not None:
            # On plain tensors: torch knows some changes only for some placements.
            plain, plain_kwargs = tree_map_only(DTensor, _whole, (args[1:], kwargs))
            func(changed._local_tensor, *plain, **plain_kwargs)
            changed._write_back()
            return changed
        given, given_kwargs = tree_map_only(_Gathered, lambda one: wrap(one, one._local_tensor), (args, kwargs))
        made = func(*given, **given_kwargs)
        if func in _VIEWS and isinstance(args[0], _Gathered):
            return _as_gathered(made, args[0], func, args, kwargs)
        return made

    def _write_back(self) -> None:
        source = self._source
        if isinstance(source, _Gathered):  # which this is a view of, in the same memory
            source._write_back()
            return
        whole = _whole(source)
        self._select(whole).copy_(self._local_tensor)
        _write(source, whole)


def _registered() -> dict[Any, Handler]:
    # Torch has no public way to say what an operation does.
    handlers: dict[Any, Handler] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[assignment]
    return handlers


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation as torch does; threads may do so at the same time."""
    handlers = _registered()
    handler = handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[op] = handler


def _is_looked_at(tensor: Tensor) -> bool:
    """Whether a tensor is no part of what gradients pass through, nor of a forward pass."""
    return not (torch.is_grad_enabled() and tensor.requires_grad) and not is_in_forward()


def _make_view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if not _is_looked_at(source):
        return _run(op, args, kwargs)
    try:
        made = _run(op, args, kwargs)
    except RuntimeError:  # torch has no way to make it of parts
        made = tree_map_only(Tensor, partial(_spread, like=source), op(_whole(source), *args[1:], **kwargs))
    return _as_gathered(made, source, op, args, kwargs)


def _as_gathered(made: Any, source: DTensor, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return views that write to their source, of those that do not share its memory."""

    def select(whole: Tensor, number: int | None = None) -> Tensor:
        views = op(whole, *args[1:], **kwargs)
        one: Tensor = views if number is None else views[number]
        return one

    if isinstance(made, list | tuple):
        return [_as_one(one, source, partial(select, number=number)) for number, one in enumerate(made)]
    return _as_one(made, source, select)


def _as_one(made: DTensor, source: DTensor, select: Callable[[Tensor], Tensor]) -> DTensor:
    is_own = made._local_tensor.untyped_storage().data_ptr() == source._local_tensor.untyped_storage().data_ptr()
    if is_own and not isinstance(source, _Gathered):
        return made
    if not all(placement.is_replicate() for placement in made.placements):
        made = made.redistribute(placements=[Replicate()] * made.device_mesh.ndim)
    view = _Gathered(made._local_tensor, made._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    view._source, view._select = source, select
    return view


def _change_beside(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changed = args[0]
    if not isinstance(changed, DTensor) and _is_looked_at(changed):  # an average, say, of which this rank has all
        others, named = tree_map_only(Tensor, _whole, (args[1:], kwargs))
        return op(changed, *others, **named)
    is_beside = isinstance(changed, DTensor) and tree_any(_is_plain, (args[1:], kwargs))
    if not is_beside or not _is_looked_at(changed):
        return _run(op, args, kwargs)

    others, named = _spread_plain((args[1:], kwargs), changed)
    return _run(op, (changed, *others), named)


def _combine(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [one for one in args if isinstance(one, Tensor)]
    # Only tensors of the same shape are surely beside a parameter: a batch, say, may be another on each rank.
    shapes = {one.shape for one in given if one.dim() or isinstance(one, DTensor)}
    if len(shapes) > 1 or not any(map(_is_plain, given)) or not all(map(_is_looked_at, given)):
        return _run(op, args, kwargs)
    like = next(one for one in given if isinstance(one, DTensor))
    return _run(op, *_spread_plain((args, kwargs), like))


def _spread_plain(data: Any, like: DTensor) -> Any:
    """Return arguments with plain tensors as DTensors, with the values that the first of the ranks has."""

    def spread(tensor: Tensor) -> Tensor:
        if not _is_plain(tensor):
            return tensor
        return _spread(_of_first(tensor.detach().clone(), like.device_mesh), like)

    return tree_map_only(Tensor, spread, data)


def _change_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changed = args[0]
    if not isinstance(changed, DTensor):
        return _run(op, args, kwargs)
    others, named = tree_map_only(DTensor, _whole, (args[1:], kwargs))
    whole = _whole(changed)
    op(whole, *others, **named)
    _write(changed, whole)
    return changed


def _draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changed = args[0]
    _write(changed, _drawn(lambda empty: op(empty, *args[1:], **kwargs), changed))
    return changed


def _draw_like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = args[0]
    given = _whole(like) if op is _aten.bernoulli.default else None
    whole = _drawn(lambda empty: op(empty if given is None else given, *args[1:], **kwargs), like)
    if any(placement.is_partial() for placement in like.placements):
        return _spread(whole, like)
    part = local_slice(whole, like)
    return wrap(like, part.reshape(like._local_tensor.shape).contiguous())


def _drawn(draw: Callable[[Tensor], Tensor], like: DTensor) -> Tensor:
    """Return random numbers for all of a DTensor, those of the first of its ranks."""
    return _of_first(
        draw(torch.empty(like.shape, dtype=like.dtype, device=like._local_tensor.device)), like.device_mesh
    )


def _of_first(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the values that the first of the ranks has: others may have a seed of their own."""
    tensor = tensor.contiguous()
    for axis in range(mesh.ndim):
        dist.broadcast(tensor, group=mesh.get_group(axis), group_src=0)
    return tensor


def _spread(whole: Tensor, like: DTensor) -> DTensor:
    """Return a tensor, which is the same on all ranks, as a DTensor of which each has all."""
    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.dim() > 0


def _whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor as a plain one, which is no view of a parameter."""
    if isinstance(tensor, _Gathered):
        return tensor._local_tensor
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        whole: Tensor = tensor.full_tensor()
    return whole.clone() if whole.data_ptr() == tensor._local_tensor.data_ptr() else whole


def _write(tensor: Tensor, whole: Tensor) -> None:
    """Give a tensor, of which this rank may have a part, its part of a whole one."""
    held = local(tensor)
    held.copy_(local_slice(whole, tensor).reshape(held.shape))
