"""A common initial state of the workers: compared by shape, then copied from rank 0."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paceline.comm.group import Group
from paceline.data.batch import describe, list_tensors, map_tensors
from paceline.errors import SettingsError
from paceline.parallel.local import local

_CHUNK_BYTES = 64 * 2**20
_HOLDERS = (list, tuple, deque, dict, nn.Module, nn.Parameter)
"""Types of attributes in which parameters may be."""


def check_same_model(module: nn.Module, group: Group) -> None:
    """Compare names, shapes and dtypes of parameters and buffers with rank 0's.

    What attributes hold without registering it (a list of modules) is compared by its values, which are never sent.

    Raises:
        SettingsError: Ranks differ; the message names the rank and the first difference.
    """
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    mine = [
        f"{name}: {tuple(t.shape)} {t.dtype}"
        f"{'' if t.is_contiguous() else f', strides {t.stride()}'}{', frozen' if name in frozen else ''}"
        for name, t in _tensors(module)
    ]
    mine += [f"{name}, which is not registered (take nn.ModuleList), of {_hash(t)}" for name, t in _list_hidden(module)]
    everybody = group.gather_documents(list(mine), name="model shapes")
    for rank, theirs in enumerate(everybody):
        for here, there in zip([*everybody[0], "nothing"], [*theirs, "nothing"], strict=False):
            if here != there:
                raise SettingsError(
                    f"every rank must build the same model, but rank {rank} has {there} where rank 0 has {here}; "
                    "start all ranks with the same code and settings"
                )


def broadcast_module(module: nn.Module, group: Group) -> None:
    """Copy parameters and buffers of rank 0 to every rank."""
    broadcast_tensors([tensor for _, tensor in _tensors(module)], group)


def broadcast_sample(sample: Any, group: Group) -> Any:
    """Return rank 0's inputs of the model, on this rank's device.

    Raises:
        SettingsError: There is none, or ranks have inputs of different shapes.
    """
    said = group.gather_documents(describe(sample) if list_tensors(sample) else "", name="sample")
    if not all(said) or len(set(said)) > 1:
        rank = next((rank for rank, about in enumerate(said) if about != said[0] or not about), 0)
        there = f" where rank 0 has {said[0]}" if rank else ""
        raise SettingsError(
            "sample must be inputs of at least one sample for a tensor or expert axis, of the same shapes on every "
            f"rank, but rank {rank} has {said[rank] or 'none'}{there}; give parallelize one, such as the model's "
            "inputs of the data set's first sample"
        )
    sample = map_tensors(lambda tensor: tensor.to(group.device, copy=True), sample)
    broadcast_tensors(list_tensors(sample), group)
    return sample


def broadcast_tensors(tensors: Iterable[Tensor], group: Group, source: int = 0) -> None:
    """Copy rank `source`'s `tensors` into those of every rank, several in one message."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        chunk: list[Tensor] = []
        for tensor in alike:
            chunk.append(tensor)
            if sum(t.nbytes for t in chunk) >= _CHUNK_BYTES:
                _broadcast_chunk(chunk, group, source)
                chunk = []
        if chunk:
            _broadcast_chunk(chunk, group, source)


def _broadcast_chunk(tensors: list[Tensor], group: Group, source: int) -> None:
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors]).to(group.device)
    if flat.numel() > 0:
        # As bytes, since no backend supports every dtype.
        group.broadcast(flat.view(torch.uint8), source=source, name="copy of the state").wait()
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view_as(tensor))


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    parameters = [(name, local(parameter.detach())) for name, parameter in module.named_parameters()]
    return parameters + [(name, local(buffer)) for name, buffer in module.named_buffers()]


def _list_hidden(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that attributes hold, alone or in containers, without being the module's."""
    known = {id(one) for one in [*module.modules(), *module.parameters()]}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                yield from _walk(value, f"{name}.{key}" if name else key, known)


def _walk(value: Any, place: str, known: set[int]) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(value, _HOLDERS) or id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, nn.Parameter):
        yield place, value
    elif isinstance(value, nn.Module):
        yield from ((f"{place}.{leaf}", tensor) for leaf, tensor in _tensors(value))
    else:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(one, _HOLDERS):
                yield from _walk(one, f"{place}[{key!r}]", known)


def _hash(tensor: Tensor) -> str:
    """Return a text of a tensor's values, or of its shape if it has none, or is sparse."""
    if tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
        return str(tuple(tensor.shape))
    content = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_hexdigest(content.tobytes())
