"""A device that is none: its tensors lie in host memory, but may not be mixed with those of the CPU."""

import functools

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device("lazy", 0)  # autograd needs no thread for this kind, and nothing else here is of it
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default, torch.ops.aten._to_copy.default}


class DistantTensor(Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )

    def __init__(self, inner):
        self.inner = inner

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class OnDevice(TorchDispatchMode):
    """Inside, in one thread, tensors can be made on the device."""

    def __enter__(self):
        torch._C._set_only_lift_cpu_tensors(True)  # or `torch.tensor` with a device would pass modes by
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    tensors = [*_tensors_of(args), *_tensors_of(kwargs.values())]
    is_distant = any(isinstance(tensor, DistantTensor) for tensor in tensors)
    if func in _COPIES:
        is_distant = isinstance(tensors[0], DistantTensor)
    elif is_distant and any(tensor.dim() for tensor in tensors if not isinstance(tensor, DistantTensor)):
        raise RuntimeError(f"{func} must have tensors of one device, but got some on the CPU and some on {DEVICE}")
    if kwargs.get("device") is not None:
        is_distant = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = func(*_map(_bring_near, args), **{name: _map(_bring_near, value) for name, value in kwargs.items()})
    if not is_distant:
        return out
    out = _map(lambda tensor: tensor if isinstance(tensor, DistantTensor) else DistantTensor(tensor), out)
    return return_and_correct_aliasing(func, args, kwargs, out) if _has_aliases(func) else out


@functools.cache
def _has_aliases(func):
    return any(value.alias_info is not None for value in (*func._schema.arguments, *func._schema.returns))


def _bring_near(tensor):
    return tensor.inner if isinstance(tensor, DistantTensor) else tensor


def _tensors_of(values):
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_of(value)


def _map(change, value):
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_map(change, part) for part in value) if type(value) in (list, tuple) else value
