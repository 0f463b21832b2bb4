"""The part of a tensor that lies on this rank, and tensors made of such parts; nothing here communicates."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from paceline.topology.layout import Axis


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, live: what is written into it is the DTensor's. Others are all here."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # or it would be a copy that autograd knows
        return tensor.to_local()


def wrap(like: Tensor, local_part: Tensor, placements: Sequence[Placement] | None = None) -> Tensor:
    """Return a tensor of the shape and mesh of `like` whose part on this rank is `local_part`, and stays so.

    Args:
        like: A DTensor; with any other tensor, `local_part` is returned as it is.
        local_part: Of the shape that `placements` leave this rank.
        placements: Along each dimension of the mesh; by default those of `like`.
    """
    if not isinstance(like, DTensor):
        return local_part
    chosen = tuple(placements or like.placements)
    with torch.no_grad():
        return DTensor.from_local(
            local_part, like.device_mesh, chosen, run_check=False, shape=like.shape, stride=like.stride()
        )


def local_slice(full: Tensor, like: Tensor) -> Tensor:
    """Return what of the `full` tensor lies on this rank if it is laid out as `like` is; all if that is no DTensor.

    Torch's own `distribute_tensor` refuses dims that a tensor and a sharded axis both cut, and not evenly.

    Args:
        full: Of the same shape as `like`; may be on another device.
        like: A DTensor without partial sums.
    """
    if not isinstance(like, DTensor):
        return full
    # FSDP cuts what other cuts along the same dim have left; its placement is of another type then.
    cuts = [(type(placement) is not Shard, axis) for axis, placement in enumerate(like.placements)]
    for _, axis in sorted(cuts):
        placement = like.placements[axis]
        if not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]
            place = like.device_mesh.get_local_rank(axis)
            full = _slice(full, dim, like.device_mesh.size(axis), place)
    return full


def is_partial(tensor: Tensor, axis: Axis) -> bool:
    """Return whether the ranks along `axis` hold summands of the tensor that have still to be added."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return axis in names and tensor.placements[names.index(axis)].is_partial()


def _slice(tensor: Tensor, dim: int, num_slices: int, place: int) -> Tensor:
    """Return one of the slices that `torch.chunk` makes; it makes fewer than asked for where there is too little."""
    length = -(-tensor.shape[dim] // num_slices)
    begin = min(place * length, tensor.shape[dim])
    return tensor.narrow(dim, begin, min(length, tensor.shape[dim] - begin))
