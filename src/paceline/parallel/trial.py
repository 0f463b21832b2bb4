"""Trials of a model before it trains, after which its values, modes and random streams are what they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from paceline.parallel.local import local

_NOISE = 0.1
_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """While active, a module runs as in evaluation; afterwards modes, buffers and random streams are what they were."""
    modes = {part: part.training for part in module.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        module.eval()
        try:
            yield
        finally:
            for part, mode in modes.items():
                part.training = mode
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


@contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """While active, a module runs as in training, but drops nothing, and norms use the statistics they have."""
    modes = {part: part.training for part in module.modules()}
    module.train()
    for part in modes:
        if isinstance(part, _NormBase):
            part.eval()
    try:
        with _NoDropout():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode


class _NoDropout(TorchFunctionMode):
    """Mode in which dropout keeps everything."""

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


def _draw(shape: torch.Size, seed: int) -> Tensor:
    """Return noise of either sign and of magnitudes about one, of which none is small: it may be a single gate."""
    generator = torch.Generator().manual_seed(seed)
    noise = 2 * torch.rand(shape, generator=generator, dtype=torch.float32) - 1
    return noise + noise.sign() * 0.5
