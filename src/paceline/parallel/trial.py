"""Trials of a model before it trains, after which its values, modes and random streams are what they were."""

import copy
import random
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from paceline.data.batch import call, list_tensors, map_tensors
from paceline.parallel.local import local

CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Names of arguments and outputs of transformers' models that hold keys and values: a second run appends to these."""
_NOISE = 0.1
_MAX_PERTURBED = 1e3
"""Number from which on a buffer is one of masks."""
_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
)


_OF_TORCH = frozenset(key for key in vars(nn.Module()) if "forward" not in key and "backward" not in key) - {"training"}
"""Attributes in which torch keeps a module's parts and hooks, but for those of its forward and backward."""


@contextmanager
def restored(module: nn.Module, *, on_copies: bool = False) -> Iterator[None]:
    """Around runs of a module: afterwards buffers, attributes, modes, hooks and random streams are what they were.

    A forward that installs hooks once, and notes that in an attribute, does so again. Attributes may be assigned anew
    or change inside: tensors, and lists, dicts and sets of such. Nothing may split the module meanwhile, which changes
    attributes for good; see `undisturbed`.

    Args:
        module: The module.
        on_copies: Run on copies of its tensors, so that backward may follow afterwards.
    """
    state = _State(module)
    if on_copies:
        state.copy_tensors()
    with _random_state_kept(module):
        try:
            yield
        finally:
            state.restore()


@contextmanager
def _random_state_kept(module: nn.Module) -> Iterator[None]:
    devices = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


class _State:
    """Buffers, attributes and hooks of a module and its parts, with copies of what may change inside of them."""

    def __init__(self, module: nn.Module) -> None:
        holders = [holder for part in module.modules() for holder in (vars(part), part._buffers)]
        self._holders = [(holder, {key: holder[key] for key in holder if key not in _OF_TORCH}) for holder in holders]
        self._contents: dict[int, tuple[Any, Any]] = {}
        for _, values in self._holders:
            for value in values.values():
                self._keep(value)
        self._hooks = [(one, [dict(held) for held in _list_hooks(one)]) for one in module.parameters()]

    def copy_tensors(self) -> None:
        """Put copies in the place of tensors that may change."""
        copies: dict[int, Tensor] = {}
        for holder, values in self._holders:
            for key, value in values.items():
                if isinstance(value, Tensor) and id(value) in self._contents:
                    if id(value) not in copies:
                        copies[id(value)] = value.detach().clone()
                    holder[key] = copies[id(value)]

    def restore(self) -> None:
        """Put everything back."""
        for holder, values in self._holders:
            for key in [key for key in holder if key not in _OF_TORCH and key not in values]:
                del holder[key]
            holder.update(values)
        for parameter, kept in self._hooks:
            for held, before in zip(_list_hooks(parameter), kept, strict=True):
                held.clear()
                held.update(before)
        with torch.no_grad():
            for value, before in self._contents.values():
                if isinstance(value, Tensor):
                    value.copy_(before)
                    continue
                if isinstance(value, torch.Generator):
                    value.set_state(before)
                    continue
                value.clear()
                value.update(before) if isinstance(value, MutableMapping | set) else value.extend(before)

    def _keep(self, value: Any) -> None:
        if id(value) in self._contents:
            return
        if isinstance(value, Tensor):
            is_plain = not isinstance(value, nn.Parameter) and value.grad_fn is None and not value.is_inference()
            if is_plain and not (value.numel() > 1 and 0 in value.stride()):  # such as one value for all elements
                self._contents[id(value)] = value, value.detach().clone()
        elif isinstance(value, torch.Generator):
            self._contents[id(value)] = value, value.get_state()
        elif isinstance(value, dict | list | set | deque):
            self._contents[id(value)] = value, copy.copy(value)
            for one in value.values() if isinstance(value, dict) else value:
                self._keep(one)


def _list_hooks(parameter: Tensor) -> list[dict[int, Any]]:
    """Return the hooks on a parameter's gradient, and those after its sum."""
    return [parameter._backward_hooks or {}, getattr(parameter, "_post_accumulate_grad_hooks", None) or {}]


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """While active, a module runs as in evaluation; afterwards modes, buffers and random streams are what they were.

    It may be split meanwhile. Runs that may change attributes are `restored` each.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with _random_state_kept(module), evaluating(module):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """While active, a module runs as in evaluation.

    Its `eval` is not called, which may do more than set the mode: adapters merge their weights in it.
    """
    modes = {part: part.training for part in module.modules()}
    for part in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def training(module: nn.Module, *, measures: bool = False) -> Iterator[None]:
    """While active, a module runs as in training, but drops nothing.

    Args:
        module: Module.
        measures: Whether norms use the statistics of their inputs, and not those that they have.
    """
    with evaluating(module), _NoDropout():
        module.train()
        for part in module.modules():
            if isinstance(part, _NormBase) and not measures:
                part.eval()
        yield


def is_random(module: nn.Module, sample: Any) -> bool:
    """Return whether a module's output depends on the random seed, and on nothing else that changes between runs."""
    found = []
    with torch.no_grad():
        for seed in (0, 1, 0):
            with restored(module):
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
                outputs = list_tensors(call(module, map_tensors(torch.clone, sample)))
                found.append([output for output in outputs if output.is_floating_point()])
    return _are_close(found[0], found[2]) and not _are_close(found[0], found[1])


def _are_close(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.allclose(one, other, 1e-4, 1e-6, equal_nan=True) for one, other in pairs)


class _NoDropout(TorchFunctionMode):
    """Mode in which dropout keeps everything."""

    stays_in_backward = True
    """Whether blocks that backward computes again do so in this mode too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *([0.0] if len(args) > 4 else []), *args[5:]), {**kwargs}
            kwargs.pop("dropout_p", None)
        if func is F.multi_head_attention_forward and "training" in kwargs:
            kwargs = {**kwargs, "training": False}
        return func(*args, **kwargs)


@contextmanager
def without_constants(module: nn.Module) -> Iterator[None]:
    """While active, parameters of equal elements hold noise, in the whole model and in its parts.

    A bias of zeros that is added too often would not be seen, nor would anything before a matrix of zeros.
    """
    constants: dict[str, float] = {}
    for number, (name, parameter) in enumerate(module.named_parameters()):
        if not parameter.numel() or not parameter.is_floating_point():
            continue
        low, high = torch.aminmax(parameter.detach())
        if bool(low == high):
            constants[name] = float(low)
            scale = _NOISE if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.detach().add_((_draw(parameter.shape, number) * scale).to(parameter))
    try:
        yield
    finally:
        parameters = dict(module.named_parameters())
        for name, constant in constants.items():
            if name in parameters:
                local(parameters[name]).detach().fill_(constant)


@contextmanager
def perturbed(module: nn.Module) -> Iterator[None]:
    """While active, numbers of parameters and buffers that are constant, or small for their shape, are noise.

    So a branch behind a gate of zero, or of weights of 1e-4, has outputs like all others. Signs that all numbers of a
    tensor share stay, since it may be one of variances; masks stay.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = [tensor.detach() for _, tensor in named if tensor.numel() and tensor.is_floating_point()]
    kept = [tensor.clone() for tensor in tensors]
    for number, tensor in enumerate(tensors):
        low, high = (float(end) for end in torch.aminmax(tensor))
        is_mask = not max(-low, high) < _MAX_PERTURBED or (low != high and bool(((tensor == 0) | (tensor == 1)).all()))
        if is_mask:
            continue
        scale = _NOISE if tensor.dim() < 2 else tensor.shape[-1] ** -0.5
        noise = (_draw(tensor.shape, number) * scale).to(tensor)
        noise = noise.abs() if low >= 0 else noise
        tensor.add_(noise if low == high else noise.where(tensor.abs() < 0.1 * scale, 0))
    try:
        yield
    finally:
        for tensor, before in zip(tensors, kept, strict=True):
            tensor.copy_(before)


def _draw(shape: torch.Size, seed: int) -> Tensor:
    """Return noise of either sign and of magnitudes about one, of which none is small: it may be a single gate."""
    generator = torch.Generator().manual_seed(seed)
    noise = 2 * torch.rand(shape, generator=generator, dtype=torch.float32) - 1
    return noise + noise.sign() * 0.5


_MASKS = ("mask", "position", "type")
"""Parts of the names of inputs that say something of other inputs."""


def vary(sample: Any, seed: int = 0) -> Any:
    """Return another sample of the same shapes, for what a model does by the values of its inputs.

    Of numbers such as ids of tokens some are zero, the others are those of the sample in another order. What is False
    or True everywhere is the opposite. Masks and positions stay.
    """
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or not tensor.numel():
            return tensor.clone()
        if tensor.dtype == torch.bool:
            return ~tensor if tensor.all() or not tensor.any() else tensor.flip(1)
        counts = torch.arange(tensor.shape[1], device=tensor.device)
        if not tensor.is_floating_point() and (
            tensor.max() <= 1 or (tensor.reshape(*tensor.shape[:2], -1) == counts[:, None]).all()
        ):
            return tensor.clone()
        width = tensor.shape[1]
        mixed = tensor[:, torch.randperm(width, generator=generator).to(tensor.device)]
        zeroed = torch.rand(len(tensor), width, generator=generator) < 0.25
        zeroed[:, [0, -1]] = False  # padding, of which transformers warns
        return mixed.masked_fill(zeroed.view(*zeroed.shape, *[1] * (tensor.dim() - 2)).to(tensor.device), 0)

    if isinstance(sample, Mapping):
        kept = {key: value for key, value in sample.items() if any(part in key for part in _MASKS)}
        return {key: kept[key] if key in kept else map_tensors(change, value) for key, value in sample.items()}
    return map_tensors(change, sample)
