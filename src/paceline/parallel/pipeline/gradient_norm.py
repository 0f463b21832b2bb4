"""Norms of gradients by torch's own functions, which a rank calls with those of its stages alone.

So `torch.nn.utils.clip_grad_norm_` clips as in one process, wherever a loop or a hook of an optimizer calls it.
"""

from collections.abc import Callable, Iterable, Mapping
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grad

from paceline.errors import SettingsError
from paceline.parallel.local import wrap
from paceline.parallel.pipeline.layers import AbsentModule

Norm = Callable[[Mapping[str, nn.Parameter]], Tensor]
"""Function that returns the norm of all gradients of a model, given this rank's parameters by name."""

_norms: WeakKeyDictionary[nn.Module, WeakMethod[Norm]] = WeakKeyDictionary()
_own_norm = clip_grad._get_total_norm


def let_norms_span_stages(module: nn.Module, norm: Norm) -> None:
    """Let torch's norm of gradients be that of a whole model, from now on, where it is asked for those of `module`.

    Args:
        module: This rank's part of a model.
        norm: Method that returns the norm over all ranks, each of which calls it.
    """
    _norms[module] = WeakMethod(norm)
    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = _total_norm


@torch.no_grad()
def _total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for module, reference in list(_norms.items()):
        names = {id(one.grad): name for name, one in module.named_parameters() if one.grad is not None}
        mine = [names[id(one)] for one in given if id(one) in names]
        norm = reference()
        if norm is None or not mine or _is_of_one_stage(module, mine):
            continue
        if len(mine) < len(names) or float(norm_type) != 2.0:
            raise SettingsError(
                "a norm of gradients must be of order 2 and of all parameters, or of those of one stage, for a "
                f"pipeline, whose other ranks have other parameters, but got order {norm_type} of {len(mine)} of the "
                f"{len(names)} gradients of this rank; pass model.parameters(), or give the Replica clip_norm"
            )
        first = next(one for one in given if id(one) in names)
        whole = norm(dict(module.named_parameters())).to(first.device, first.dtype)
        if isinstance(first, DTensor):
            whole = wrap(first.sum(), whole, [Replicate()] * first.device_mesh.ndim)
        given = [whole, *(one for one in given if id(one) not in names)]
    return _own_norm(given, norm_type, error_if_nonfinite, foreach)


def _is_of_one_stage(module: nn.Module, names: list[str]) -> bool:
    """Return whether the module around some parameters has none on other ranks."""
    paths = [name.split(".")[:-1] for name in names]
    shared = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    around = module.get_submodule(".".join(shared))
    return not any(isinstance(part, AbsentModule) for part in around.modules())
