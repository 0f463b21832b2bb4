"""The complete state of a training, as named tensors and one JSON document, and back.

Tensors are named ``model/<parameter or buffer>``, ``optimizer/<parameter>/<key>`` and, for buffers that differ between
workers (BatchNorm's statistics), ``worker<rank>/<buffer>``. What is each worker's own is in ``own<rank>/...``:
``feedback/<parameter>/<site>``, what its codec holds back; and, where a rule lets workers differ, ``model/...`` and
``optimizer/...`` again, and ``sync/...``, what the rule keeps; what it keeps on all alike is ``sync/...`` without a
rank. ``model/`` is then what the workers together stand for.

Random streams need no state: every step seeds its own from (seed, step, worker). Data that draws random numbers as it
is read must seed them from the sample's index.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint import Checkpoint
from paceline.comm.group import Group
from paceline.errors import CheckpointError, SettingsError
from paceline.parallel.start import broadcast_tensors
from paceline.parallel.zero_redundancy import own_part
from paceline.replica.hashing import hash_tensor
from paceline.replica.replica import Replica
from paceline.sync.batch_statistics import find_statistics, pool_moments, set_moments
from paceline.training.optimizer_state import load_optimizer, model_tensors, optimizer_state
from paceline.training.own_state import Shapes, gather_own, hand_out_own, is_own, mean_of, of_kind, shapes_of
from paceline.training.part_state import capture_parts, restore_parts

Document = dict[str, Any]


class FeedbackDroppedWarning(UserWarning):
    """Codecs had held back gradients that cannot be used here."""


def capture(replica: Replica) -> tuple[dict[str, Tensor], Document]:
    """Return the tensors and the document of a replica. Every rank calls it; rank 0's is complete.

    Raises:
        DivergenceError: Replicas should be equal and are not.
    """
    replica.compare()
    if replica.part.mesh is not None:
        return capture_parts(replica)
    replica.flush()
    module, group = replica.module, replica.group
    own = {f"feedback/{name}": tensor for name, tensor in replica.feedback().items()}
    optimizer_tensors, scalars = optimizer_state(module, replica.optimizer)
    shared: dict[str, Tensor] = {}
    if replica.sync.keeps_replicas_equal:
        model = model_tensors(module)
    else:
        own_sync, shared_sync = replica.sync_state()
        own |= {f"sync/{name}": tensor for name, tensor in own_sync.items()}
        shared = {f"sync/{name}": tensor for name, tensor in shared_sync.items()}
        own |= {f"model/{name}": parameter.detach() for name, parameter in module.named_parameters()}
        own |= optimizer_tensors
        optimizer_tensors = {}
        with replica.consensus():
            model = {name: tensor.clone() for name, tensor in model_tensors(module).items()}
    tensors = {f"model/{name}": tensor for name, tensor in model.items()} | optimizer_tensors
    buffers = _capture_worker_buffers(module, group)
    tensors |= buffers | shared | gather_own(own, group)
    return tensors, {
        "optimizer": {"type": type(replica.optimizer).__name__, "scalars": scalars},
        "replicas": _gather_documents(replica),
        "num_workers": group.size,
        "has_feedback": any("/feedback/" in name for name in tensors),
        "worker_tensors": sorted(buffers),
    }


def restore(checkpoint: Checkpoint | None, replica: Replica) -> Document | None:
    """Load rank 0's `checkpoint` into the replica of every rank and return its document, None without one.

    Only rank 0 reads, so hosts need not share a file system.

    Raises:
        SettingsError: It is of another model or optimizer.
        CheckpointError: It is of an older Paceline.
    """
    replica.flush()  # or it would land on what is loaded
    module, optimizer, group = replica.module, replica.optimizer, replica.group
    header = _read_header(checkpoint, own_part(optimizer)) if checkpoint is not None else None
    header = replica.part.world.gather_documents(header, name="checkpoint")[0]
    if header is None:
        return None
    if replica.part.mesh is not None:
        return restore_parts(checkpoint, replica, header)
    document: Document = header["document"]
    if document.get("layout"):  # what a rank kept of its part of a model is of no use to whole ones
        header["shapes"] = {name: spec for name, spec in header["shapes"].items() if not is_own(name)}
    is_all = not document.get("layout")
    read = _read(checkpoint, module, header["shapes"], strict=is_all) if checkpoint is not None else None
    extra = (
        read
        if read is not None
        else {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, (shape, dtype) in header["shapes"].items()
            if not is_own(name) and not name.startswith("model/")
        }
    )
    mine = {name: extra.pop(name) for name in list(extra) if is_own(name)}
    if group.size > 1:
        broadcast_tensors(model_tensors(module).values(), group)
        broadcast_tensors((extra[name] for name in sorted(extra)), group)
    _load_worker_buffers(module, extra, document["num_workers"], group)
    shapes = {name: spec for name, spec in header["shapes"].items() if is_own(name)}
    own = hand_out_own(mine, shapes, document["num_workers"], group, to_all=not _is_same(document, replica))
    theirs = [of_kind(tensors, "optimizer") for tensors in own]
    states = theirs[group.rank] if _is_same(document, replica) else mean_of(theirs)
    extra |= {f"optimizer/{name}": tensor for name, tensor in states.items()}
    load_optimizer(module, optimizer, extra, document["optimizer"]["scalars"])
    _load_replica(replica, document, own, of_kind(extra, "sync"))
    return document


def _is_same(document: Document, replica: Replica) -> bool:
    """Whether as many workers of the same rule saved the checkpoint."""
    saved = (document["replicas"][0]["sync"], document["num_workers"], document.get("layout"))
    return saved == (replica.sync.name, replica.group.size, None)


def _load_replica(
    replica: Replica, document: Document, own: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]
) -> None:
    """Load what is neither the consensus nor the optimizer's."""
    rank, saved, is_same = replica.group.rank, document["replicas"], _is_same(document, replica)
    if is_same:
        parameters = dict(replica.module.named_parameters())
        with torch.no_grad():
            for name, tensor in of_kind(own[rank], "model").items():
                parameters[name].copy_(tensor)
    replica.load_state_dict(saved[rank if is_same and len(saved) > 1 else 0], is_own=is_same)
    if saved[0]["sync"] == replica.sync.name and not document.get("layout"):
        replica.load_sync_state([of_kind(tensors, "sync") for tensors in own], shared)
    else:
        replica.load_sync_state([], {})
    feedback = [of_kind(tensors, "feedback") for tensors in own]
    if saved[0]["codec"] == replica.codec and not document.get("layout"):
        replica.load_feedback(feedback)
    elif document["has_feedback"]:
        _tell_dropped(saved[0]["codec"], document["num_workers"], replica)


def _gather_documents(replica: Replica) -> list[dict[str, Any]]:
    """Return the replicas' documents by rank; one where they are all the same."""
    mine = replica.state_dict()
    return [mine] if replica.sync.keeps_replicas_equal else replica.group.gather_documents(mine, name="replicas")


def _read_header(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a checkpoint's document, and the shapes of its tensors."""
    document = checkpoint.read_document()
    if "replicas" not in document:
        raise CheckpointError(
            f"a checkpoint must be of this version of Paceline, but {checkpoint.path} is of an older one; "
            "resume with that version, or start a new run"
        )
    if document["optimizer"]["type"] != type(optimizer).__name__:
        raise SettingsError(
            f"the optimizer must be the checkpoint's {document['optimizer']['type']}, but got "
            f"{type(optimizer).__name__}; resume with the same optimizer, or start a new run"
        )
    return {"document": document, "shapes": shapes_of(checkpoint.list_tensors())}


def _read(checkpoint: Checkpoint, module: nn.Module, shapes: Shapes, *, strict: bool) -> dict[str, Tensor]:
    """Load the model's tensors, and return the others."""
    into: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in model_tensors(module).items()}
    extra = {
        name: torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (shape, dtype) in shapes.items()
        if not name.startswith("model/")
    }
    checkpoint.load(into | extra, strict=strict)
    return extra


def _capture_worker_buffers(module: nn.Module, group: Group) -> dict[str, Tensor]:
    """Return, on rank 0, the buffers of other ranks that are not what rank 0's are."""
    if group.size == 1:
        return {}
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    if not buffers:
        return {}
    mine = {name: f"{hash_tensor(buffer):x}" for name, buffer in buffers.items()}
    hashes = group.gather_documents(mine, name="buffer hashes")
    captured: dict[str, Tensor] = {}
    for rank in range(1, group.size):
        differing = [name for name in buffers if hashes[rank][name] != hashes[0][name]]
        copies = {name: buffers[name].clone() for name in differing}
        broadcast_tensors(copies.values(), group, source=rank)
        captured |= {f"worker{rank}/{name}": copy for name, copy in copies.items()}
    return captured


def _load_worker_buffers(module: nn.Module, tensors: Mapping[str, Tensor], num_saved: int, group: Group) -> None:
    """Give each worker its own buffers where their number is as it was; else pool batch statistics over all saved."""
    buffers = dict(module.named_buffers())
    if group.size == num_saved:
        prefix = f"worker{group.rank}/"
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                buffers[name.removeprefix(prefix)].copy_(tensor)
        return
    for name, layer in find_statistics(module).items():
        mean, variance = f"{name}.running_mean", f"{name}.running_var"
        saved = [
            (
                tensors.get(f"worker{rank}/{mean}", buffers[mean]),
                tensors.get(f"worker{rank}/{variance}", buffers[variance]),
            )
            for rank in range(num_saved)
        ]
        set_moments(layer, pool_moments(saved))


def _tell_dropped(codec: str, num_saved: int, replica: Replica) -> None:
    if replica.group.rank == 0:
        here = f"codec {replica.codec!r}" if replica.codec else "no codec"
        warnings.warn(
            f"gradients that codec {codec!r} of {num_saved} workers had held back are dropped, since {here} runs among "
            f"{replica.group.size} here; resume with the same codec and more than one worker to keep them",
            FeedbackDroppedWarning,
            stacklevel=4,
        )
