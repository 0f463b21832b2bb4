"""This rank's part of a tensor, and tensors made of such parts; nothing here communicates."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from paceline.topology.layout import Axis


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor as a view: writing to it changes the DTensor. Other tensors are returned."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # otherwise it would be a copy with autograd history
        return tensor.to_local()


def wrap(like: Tensor, local_part: Tensor, placements: Sequence[Placement] | None = None) -> Tensor:
    """Return a tensor of the shape and mesh of `like` whose part on this rank is `local_part`, without a copy.

    Args:
        like: DTensor; with any other tensor, `local_part` is returned.
        local_part: This rank's part, in the shape that `placements` imply.
        placements: Placements along each dimension of the mesh; by default those of `like`.
    """
    if not isinstance(like, DTensor):
        return local_part
    chosen = tuple(placements or like.placements)
    with torch.no_grad():
        return DTensor.from_local(
            local_part, like.device_mesh, chosen, run_check=False, shape=like.shape, stride=like.stride()
        )


def local_slice(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of the `full` tensor if it is sharded like `like`; all of it if that is no DTensor.

    It is a view: with one more dim, of the parts, before a dim that joins several (see `fused_parts`). Torch's own
    `distribute_tensor` refuses dims that both a tensor and a sharded axis split unevenly.

    Args:
        full: Tensor of the same shape as `like`; may be on another device.
        like: DTensor without partial sums.
    """
    if not isinstance(like, DTensor):
        return full
    dim, num_parts = fused_parts(like)
    tensor_axis = like.device_mesh.ndim - 1
    # FSDP splits the rest that others leave of the same dim; its placement has another type then.
    cuts = [(type(placement) is not Shard, axis) for axis, placement in enumerate(like.placements)]
    for _, axis in sorted(cuts):
        placement = like.placements[axis]
        if not placement.is_replicate() and not (num_parts > 1 and axis == tensor_axis):
            full = _slice(full, placement.dim, like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis))  # type: ignore[attr-defined]
    if num_parts == 1:
        return full
    parts: Tensor = full.unflatten(dim, (num_parts, like.device_mesh.size(tensor_axis), -1))
    return parts.select(dim + 1, like.device_mesh.get_local_rank(tensor_axis))


def fused_parts(tensor: Tensor) -> tuple[int, int]:
    """Return the dim of which each rank of the tensor axis has a slice of each of several parts, and their number.

    It is 1 if there is no such dim. The tensor axis is the last of a mesh.
    """
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
    placement = tensor.placements[-1] if isinstance(tensor, DTensor) else None
    if names and names[-1] == "tensor" and isinstance(placement, _StridedShard):
        return placement.dim, int(placement.split_factor)
    return 0, 1


def is_partial(tensor: Tensor, axis: Axis) -> bool:
    """Return whether the ranks along `axis` hold partial sums of the tensor."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return axis in names and tensor.placements[names.index(axis)].is_partial()


def _slice(tensor: Tensor, dim: int, num_slices: int, place: int) -> Tensor:
    """Return one of the slices of `torch.chunk`, or an empty one if it makes fewer."""
    length = -(-tensor.shape[dim] // num_slices)
    begin = min(place * length, tensor.shape[dim])
    return tensor.narrow(dim, begin, min(length, tensor.shape[dim] - begin))


def list_gathered(part: nn.Module | FSDPModule) -> list[Any]:
    """Return torch's records of the parameters that a module gathers for its forward; others gather none."""
    groups = part._get_fsdp_state()._fsdp_param_groups if isinstance(part, FSDPModule) else ()
    return [parameter for group in groups for parameter in group.fsdp_params]
