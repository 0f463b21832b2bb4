"""The complete state of a training whose ranks share a model, and back: into any other layout.

``model/...`` and ``optimizer/...`` are whole tensors, gathered on rank 0 under the names they have in the whole model:
each rank takes its part of them again. What a rank keeps for itself, or a rule on its part of a model, is in
``own<rank>/...``: it comes back where as many ranks of the same layout go on with the same rule, and else begins anew
from the consensus.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.checkpoint import Checkpoint
from paceline.comm.group import Group
from paceline.errors import CheckpointError
from paceline.parallel.local import local, part, wrap
from paceline.parallel.start import broadcast_tensors
from paceline.parallel.zero_redundancy import own_part
from paceline.replica.replica import Replica
from paceline.sync.batch_statistics import pool_moments, pooled_over_workers
from paceline.topology.layout import Axis
from paceline.training.optimizer_state import load_optimizer, model_tensors, optimizer_state
from paceline.training.own_state import Shapes, gather_own, gather_whole, hand_out_own, is_own, mean_of, of_kind

Document = dict[str, Any]


def capture_parts(replica: Replica) -> tuple[dict[str, Tensor], Document]:
    """Return the tensors and the document of a replica. Every rank calls it; rank 0's is complete."""
    replica.flush()
    module, world = replica.module, replica.part.world
    own = {f"feedback/{name}": tensor for name, tensor in replica.feedback().items()}
    if replica.part.coded is not None:
        own |= {f"sharded/{name}": tensor for name, tensor in replica.part.coded.state().items()}
    own |= {f"buffer/{name}": buffer for name, buffer in model_tensors(module).items() if _is_buffer(module, name)}
    optimizer, scalars = optimizer_state(module, own_part(replica.optimizer))
    if not replica.sync.keeps_replicas_equal:
        own_sync, shared_sync = replica.sync_state()
        own |= {f"sync/{name}": tensor for name, tensor in own_sync.items()}
        own |= {f"shared/{name}": tensor for name, tensor in shared_sync.items()}
        own |= {f"model/{name}": local(parameter.detach()) for name, parameter in module.named_parameters()}
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        for name, tensor in optimizer.items():
            # What is not laid out as its parameter is, such as means over rows, only its rule can cut again.
            is_cut_alike = tensor.shape == shapes[name.removeprefix("optimizer/").rpartition("/")[0]]
            own[name] = local(tensor) if is_cut_alike or not isinstance(tensor, DTensor) else tensor.full_tensor()
        optimizer = {name: _mean(tensor, replica.group) for name, tensor in optimizer.items()}
    with replica.consensus(), pooled_over_workers(module, replica.part.observers):
        mine = {f"model/{name}": tensor for name, tensor in model_tensors(module).items()} | optimizer
        whole = dict(_make_whole(mine, replica))
    tensors = gather_whole(whole, world) | gather_own(own, world)
    kept = world.gather_documents(scalars, name="optimizer's numbers")
    return tensors, {
        "optimizer": {
            "type": type(own_part(replica.optimizer)).__name__,
            "scalars": {name: values for document in kept for name, values in document.items()},
        },
        "replicas": world.gather_documents(replica.state_dict(), name="replicas"),
        "num_workers": world.size,
        "layout": replica.part.describe(),
        "has_feedback": any("/feedback/" in name for name in tensors),
        "worker_tensors": [],
    }


def restore_parts(checkpoint: Checkpoint | None, replica: Replica, header: Mapping[str, Any]) -> Document:
    """Load rank 0's `checkpoint`, of any layout, into what each rank holds, and return its document.

    Args:
        checkpoint: On rank 0.
        replica: Every rank's.
        header: Its ``document``, and the ``shapes`` of all tensors in it; on every rank.

    Raises:
        CheckpointError: It is of another model.
    """
    document: Document = header["document"]
    shapes: Shapes = header["shapes"]
    world, module = replica.part.world, replica.module
    _check_fits(shapes, module)
    extra = _read(checkpoint, shapes) if checkpoint is not None else {}
    own_names = [name for name in shapes if is_own(name)]
    _pool_statistics(extra, document["num_workers"])
    means = _mean_optimizer(extra, shapes, document["num_workers"])
    mine = {f"model/{name}": tensor for name, tensor in model_tensors(module).items()}
    parameters = dict(module.named_parameters())
    states: dict[str, Tensor] = {}
    for name in sorted([name for name in shapes if name.split("/")[0] in ("model", "optimizer")] + list(means)):
        whole = _broadcast(extra.get(name), means.get(name) or shapes[name], world)
        if name in mine:
            with torch.no_grad():
                local(mine[name]).copy_(part(whole, mine[name]))
        elif (parameter := parameters.get(name.removeprefix("optimizer/").rpartition("/")[0])) is not None:
            states[name] = _part_state(whole, parameter)
    load_optimizer(module, own_part(replica.optimizer), states, document["optimizer"]["scalars"])
    is_same = is_same_layout(document, replica)
    own: list[dict[str, Tensor]] = []
    if is_same:
        read = {name: extra[name] for name in own_names if name in extra}
        own_shapes = {name: shapes[name] for name in own_names}
        own = hand_out_own(read, own_shapes, document["num_workers"], world, to_all=False)
    _load_own(replica, document, own[world.rank] if is_same else {}, is_same=is_same)
    return document


def is_same_layout(document: Document, replica: Replica) -> bool:
    """Whether ranks laid out alike, with the same rule, saved the checkpoint."""
    same_rule = document["replicas"][0]["sync"] == replica.sync.name
    return same_rule and document.get("layout") == replica.part.describe()


def _load_own(replica: Replica, document: Document, own: Mapping[str, Tensor], *, is_same: bool) -> None:
    rank = replica.part.world.rank if is_same else 0
    with torch.no_grad():
        targets = model_tensors(replica.module)
        for kind in ("buffer", "model"):
            for name, tensor in of_kind(own, kind).items():
                local(targets[name]).copy_(tensor)
    if theirs := of_kind(own, "optimizer"):
        parameters = dict(replica.module.named_parameters())
        states = {
            f"optimizer/{name}": wrap(parameters[name.rpartition("/")[0]], tensor)
            if tensor.shape == local(parameters[name.rpartition("/")[0]]).shape
            else tensor
            for name, tensor in theirs.items()
        }
        load_optimizer(replica.module, own_part(replica.optimizer), states, document["optimizer"]["scalars"])
    if replica.part.coded is not None:
        replica.part.coded.load_state(of_kind(own, "sharded"))
    replica.load_state_dict(document["replicas"][rank], is_own=is_same)
    group = replica.group
    alone = [of_kind(own, "sync") if number == group.rank else {} for number in range(group.size)]
    replica.load_sync_state(alone if is_same else [], of_kind(own, "shared"))
    if is_same and document["replicas"][rank]["codec"] == replica.codec:
        replica.load_feedback([of_kind(own, "feedback") if n == group.rank else {} for n in range(group.size)])


def _make_whole(tensors: Mapping[str, Tensor], replica: Replica) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors on the ranks that hand them in, one at a time: all ranks take part, few keep them."""
    mesh = replica.part.mesh
    assert mesh is not None
    alike: list[Axis] = ["data", "context", "tensor"]
    if not replica.part.layout.shares_optimizer:
        alike.append("sharded")
    keeps = all(mesh.coordinate(axis) == 0 for axis in alike)
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keeps:
            yield name, whole.detach().clone()


def _mean(tensor: Tensor, group: Group) -> Tensor:
    total = local(tensor).double()
    if group.size > 1:
        group.all_reduce(total, name="optimizer's mean").wait()
    return wrap(tensor, (total / group.size).to(tensor.dtype))


def _check_fits(shapes: Shapes, module: nn.Module) -> None:
    """Refuse a checkpoint without this rank's tensors; what else is in it is for other ranks."""
    for name, tensor in model_tensors(module).items():
        saved = shapes.get(f"model/{name}")
        if saved is None or list(tensor.shape) != list(saved[0]):
            there = "is missing" if saved is None else f"has shape {tuple(saved[0])}"
            raise CheckpointError(
                f"a checkpoint must be of the model that it is loaded into, but {name} of shape {tuple(tensor.shape)} "
                f"{there} in it; resume with the model that it was saved from"
            )


def _read(checkpoint: Checkpoint, shapes: Shapes) -> dict[str, Tensor]:
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in shapes.items()}
    checkpoint.load(tensors)
    return tensors


def _pool_statistics(read: Mapping[str, Tensor], num_saved: int) -> None:
    """Make BatchNorm's statistics those of all workers, where whole models saved others than rank 0's."""
    differing = {name.partition("/")[2] for name in read if name.startswith("worker")}
    for layer in {name.removesuffix("running_mean") for name in differing if name.endswith("running_mean")}:
        mean, variance = f"{layer}running_mean", f"{layer}running_var"
        saved = [
            (
                read.get(f"worker{rank}/{mean}", read[f"model/{mean}"]),
                read.get(f"worker{rank}/{variance}", read[f"model/{variance}"]),
            )
            for rank in range(num_saved)
        ]
        pooled = pool_moments(saved)
        read[f"model/{mean}"].copy_(pooled[0])
        read[f"model/{variance}"].copy_(pooled[1])


def _mean_optimizer(read: dict[str, Tensor], shapes: Shapes, num_saved: int) -> dict[str, tuple[list[int], str]]:
    """Add the mean of optimizers that whole models had each of their own; return what it looks like, on every rank."""
    if any(name.startswith("optimizer/") for name in shapes):
        return {}
    first = {name.removeprefix("own0/"): spec for name, spec in shapes.items() if name.startswith("own0/optimizer/")}
    if read:
        everybody = [of_kind(of_kind(read, f"own{rank}"), "optimizer") for rank in range(num_saved)]
        read |= {f"optimizer/{name}": tensor for name, tensor in mean_of(everybody).items()}
    return first


def _broadcast(tensor: Tensor | None, spec: tuple[list[int], str], world: Group) -> Tensor:
    shape, dtype = spec
    held = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
    if tensor is not None:
        held.copy_(tensor)
    broadcast_tensors([held], world)
    return held


def _part_state(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a rank's part of what the optimizer keeps of a parameter: cut alike if it has its shape."""
    if whole.shape != parameter.shape:
        return whole
    return wrap(parameter, part(whole, parameter).clone())


def _is_buffer(module: nn.Module, name: str) -> bool:
    return name not in {parameter for parameter, _ in module.named_parameters()}
