"""Parameters, gradients and optimizer state in CPU memory; the device has the parameters of one operation at a time.

After ZeRO-Offload and ZeRO-Infinity (Ren et al. 2021; Rajbhandari et al. 2021), by means of autograd alone: an
operation that is given a parameter gets a copy on the device, whose gradient autograd brings back. What an operation
saves of such a copy for backward is not kept but copied again, so that no weight waits on the device from forward to
backward.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from paceline.errors import SettingsError
from paceline.sync.batch_statistics import find_statistics

_TRANSPOSES = frozenset({"T", "H", "mT", "mH", "real", "imag"})
_ABOUT = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_contiguous", "is_floating_point",
     "is_complex", "requires_grad_", "register_hook", "storage_offset"}
)  # fmt: skip
"""Methods that need no values, or are meant for the parameter itself."""


class ParameterOffload:
    """Keeps a module's parameters in CPU memory and computes on another device.

    To everything else the module is one on the CPU: its parameters and their gradients are there, and so the exchange
    of gradients, the optimizer and its state, and checkpoints. It gets inputs from CPU memory, and outputs return
    there, where the loss is computed; buffers stay on the device. Values are those of a module on the device, and those
    of the update rule on the CPU.

    On the bus, for each time that an operation uses a parameter: one copy of it in forward, one in backward if that
    needs it (two with recomputation), and one of its gradient. On the device: the parameters of the running operation,
    activations, and buffers. Under autocast the converted copies of matrices are activations, and wait for backward
    unless their block is recomputed. In-place changes of parameters in forward happen in CPU memory.

    Args:
        module: Whole module in CPU memory, not compiled. Hooks on its submodules do it; call it once.
        device: Device that computes.

    Raises:
        SettingsError: The module keeps batch statistics, which workers pool where their parameters are.
    """

    def __init__(self, module: nn.Module, device: torch.device | str) -> None:
        self._device = torch.device(device)
        if statistics := find_statistics(module):
            raise SettingsError(
                f"a model must have no BatchNorm for memory.offload parameters, but got {next(iter(statistics))}; take "
                "GroupNorm, or offload something else"
            )
        for parameter in module.parameters():
            if self._device.type == "cuda":
                parameter.data = parameter.data.pin_memory()
        for part in module.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = buffer if buffer is None else buffer.to(self._device)
        self._mode = _CopiesOnUse({id(parameter) for parameter in module.parameters()}, self._device)
        self._open = threading.local()  # backward may compute a block again in a thread of its own
        for part in module.modules():
            part.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
            part.register_forward_hook(self._end, always_call=True)

    @property
    def num_copies(self) -> int:
        """Number of copies of parameters on the device so far."""
        return self._mode.num_copies

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if getattr(self._open, "module", None) is not None:
            return None
        inputs: tuple[Any, Any] = tree_map_only(Tensor, lambda tensor: tensor.to(self._device), (args, kwargs))
        with ExitStack() as stack:
            # A block that is computed again in backward has hooks of its own, and its output stays.
            is_outside = torch._C._current_graph_task_id() == -1
            if is_outside:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._mode.save, self._mode.restore))
            if torch.is_autocast_enabled("cpu") and self._device.type != "cpu":
                dtype = torch.get_autocast_dtype("cpu")
                stack.enter_context(torch.autocast(self._device.type, dtype=dtype))
            stack.enter_context(self._mode)
            self._open.module, self._open.is_outside, self._open.stack = module, is_outside, stack.pop_all()
        return inputs

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        if getattr(self._open, "module", None) is not module:
            return None
        self._open.module = None
        self._open.stack.close()
        if not self._open.is_outside:
            return None
        return tree_map_only(Tensor, lambda tensor: tensor.to("cpu"), output)


@dataclass(frozen=True)
class _Origin:
    """What a tensor was that an operation saved for backward: a view of a parameter's copy."""

    parameter: Tensor
    version: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _CopiesOnUse(TorchFunctionMode):
    """While active, operations get copies on the device in place of parameters.

    Args:
        parameters: Identities of the parameters.
        device: Device of the copies.
    """

    def __init__(self, parameters: set[int], device: torch.device) -> None:
        super().__init__()
        self._parameters = parameters
        self._device = device
        self._origins = WeakIdKeyDictionary()
        self.num_copies = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") and self._is_home(args[0]):
            attribute = func.__self__.__name__  # type: ignore[attr-defined]
            if attribute == "device":
                return self._device
            if attribute == "is_cuda":
                return self._device.type == "cuda"
            if name == "__set__" or attribute not in _TRANSPOSES:
                return func(*args, **kwargs)
        if name in _ABOUT:
            return func(*args, **kwargs)
        if _changes_first(name) and args and self._is_home(args[0]):
            home = args[0].device
            rest, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(home), (args[1:], kwargs))
            return func(args[0], *rest, **kwargs)
        args, kwargs = tree_map_only(nn.Parameter, self._copy, (args, kwargs))
        copies = [
            leaf
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and self._find_origin(leaf) is not None
        ]
        versions = [copy._version for copy in copies]
        result = func(*args, **kwargs)
        for copy, version in zip(copies, versions, strict=True):
            if copy._version != version:  # such as by an embedding with max_norm, or an initialisation
                parameter = self._take_back(copy)
                result = parameter if result is copy and copy.shape == parameter.shape else result
        return result

    def save(self, tensor: Tensor) -> _Origin | Tensor:
        """Return what is kept for backward of a tensor that an operation saves."""
        parameter = self._find_origin(tensor)
        if parameter is None:
            return tensor
        offset = int(tensor.storage_offset())
        return _Origin(parameter, parameter._version, tensor.dtype, offset, tensor.shape, tensor.stride())

    def restore(self, saved: _Origin | Tensor) -> Tensor:
        """Return the saved tensor."""
        if isinstance(saved, Tensor):
            return saved
        if saved.parameter._version != saved.version:
            raise RuntimeError(
                "a parameter must stay from forward to backward, but one of shape "
                f"{tuple(saved.parameter.shape)} has been changed in place in between"
            )
        with torch.no_grad():
            copy = self._copy(saved.parameter)
            return copy.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)

    def _find_origin(self, tensor: Tensor) -> Tensor | None:
        if tensor.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None
        parameter: Tensor | None = self._origins.get(tensor.untyped_storage())
        return parameter

    @torch.no_grad()
    def _take_back(self, copy: Tensor) -> Tensor:
        """Give a parameter the values of its copy, of which `copy` is a view that has been changed."""
        parameter: Tensor = self._origins[copy.untyped_storage()]
        whole = torch.empty(0, dtype=parameter.dtype, device=copy.device)
        parameter.copy_(whole.set_(copy.untyped_storage(), 0, parameter.shape, parameter.stride()))
        return parameter

    def _copy(self, parameter: Tensor) -> Tensor:
        if not self._is_home(parameter):
            return parameter
        self.num_copies += 1
        copy = parameter.to(self._device, copy=True, non_blocking=parameter.is_pinned())
        self._origins[copy.untyped_storage()] = parameter
        return copy

    def _is_home(self, value: Any) -> bool:
        return id(value) in self._parameters


def _changes_first(name: str) -> bool:
    """Whether a function of that name changes its first argument in place."""
    is_operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name == "__setitem__" or is_operator or (name.endswith("_") and not name.endswith("__"))
