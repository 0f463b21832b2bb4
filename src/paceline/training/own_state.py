"""What each worker alone keeps, on its way into a checkpoint and out of it: tensors named ``own<rank>/<kind>/...``."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint import TensorSpec
from paceline.comm.group import Group
from paceline.parallel.start import broadcast_tensors

Shapes = Mapping[str, tuple[list[int], str]]
"""Shape and dtype of tensors, by name, as they travel in JSON."""


def shapes_of(tensors: Mapping[str, Tensor] | Mapping[str, TensorSpec]) -> Shapes:
    """Return the shape and dtype of each tensor."""
    return {name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}


def is_own(name: str) -> bool:
    """Whether a checkpoint's tensor is one worker's own."""
    return name.startswith("own")


def of_kind(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return one worker's tensors of one kind, without its name."""
    return {name.removeprefix(f"{kind}/"): t for name, t in tensors.items() if name.startswith(f"{kind}/")}


def gather_own(mine: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Return, on rank 0, the tensors that each rank keeps."""
    everybody: list[Shapes] = group.gather_documents(dict(shapes_of(mine)), name="shapes of own state")
    gathered = {f"own0/{name}": tensor for name, tensor in mine.items()} if group.rank == 0 else {}
    for rank in range(1, group.size):
        for tag, (name, spec) in enumerate(sorted(everybody[rank].items())):
            tensor = mine[name] if group.rank == rank else None
            if (moved := _move(tensor, spec, rank, 0, tag, f"own {name}", group)) is not None:
                gathered[f"own{rank}/{name}"] = moved
    return gathered


def gather_whole(mine: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Return, on rank 0, all tensors that some rank has: those of the lowest rank that has each."""
    everybody: list[Shapes] = group.gather_documents(dict(shapes_of(mine)), name="shapes of the state")
    gathered = {name: tensor for name, tensor in mine.items() if group.rank == 0}
    known = set(everybody[0])
    for rank in range(1, group.size):
        for tag, (name, spec) in enumerate(sorted(everybody[rank].items())):
            if name in known:
                continue
            known.add(name)
            moved = _move(mine.get(name) if group.rank == rank else None, spec, rank, 0, tag, name, group)
            if moved is not None:
                gathered[name] = moved
    return gathered


def hand_out_own(
    read: Mapping[str, Tensor], shapes: Shapes, num_saved: int, group: Group, *, to_all: bool
) -> list[dict[str, Tensor]]:
    """Return what each saved worker kept, by rank.

    Args:
        read: All tensors, on rank 0.
        shapes: Theirs, on every rank.
        num_saved: Workers that saved.
        group: Those that load.
        to_all: Whether each rank gets everything; else only that of its own number.
    """
    saved: list[dict[str, Tensor]] = [{} for _ in range(num_saved)]
    for tag, (name, spec) in enumerate(sorted(shapes.items())):
        place, _, rest = name.removeprefix("own").partition("/")
        owner = int(place)
        if to_all:
            tensor = _make(spec, group) if group.rank else read[name].to(group.device)
            broadcast_tensors([tensor], group)
            saved[owner][rest] = tensor
        elif (moved := _move(read.get(name), spec, 0, owner, tag, name, group)) is not None:
            saved[owner][rest] = moved
    return saved


def mean_of(saved: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of what all workers kept under each name."""
    return {
        name: torch.stack([tensors[name].double() for tensors in saved]).mean(0).to(first.dtype)
        for name, first in saved[0].items()
        if all(name in tensors for tensors in saved)
    }


def _make(spec: tuple[list[int], str], group: Group) -> Tensor:
    shape, dtype = spec
    return torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)


def _move(
    tensor: Tensor | None, spec: tuple[list[int], str], source: int, target: int, tag: int, name: str, group: Group
) -> Tensor | None:
    """Return rank `source`'s tensor on rank `target`, and None elsewhere."""
    if source == target:
        return tensor.to(group.device) if group.rank == target and tensor is not None else None
    if group.device.type != "cpu":  # there are no messages: everybody gets it
        held = tensor.to(group.device) if tensor is not None else _make(spec, group)
        broadcast_tensors([held], group, source=source)
        return held if group.rank == target else None
    if group.rank == source:
        assert tensor is not None
        group.send(tensor.contiguous(), target, tag=tag, name=name).wait()
    if group.rank != target:
        return None
    held = _make(spec, group)
    group.receive(held, source, tag=tag, name=name).wait()
    return held
