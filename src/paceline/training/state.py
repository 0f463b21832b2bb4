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
from paceline.sync.batch_statistics import find_statistics, pool_moments, set_moments
from paceline.training.hashing import hash_tensor
from paceline.training.own_state import Shapes, gather_own, hand_out_own, is_own, mean_of, of_kind, shapes_of
from paceline.training.replica import Replica
from paceline.training.start import broadcast_tensors

Document = dict[str, Any]


class FeedbackDroppedWarning(UserWarning):
    """Codecs had held back gradients that cannot be used here."""


def capture(replica: Replica) -> tuple[dict[str, Tensor], Document]:
    """Return the tensors and the document of a replica. Every rank calls it; rank 0's is complete."""
    replica.flush()
    module, group = replica.module, replica.group
    own = {f"feedback/{name}": tensor for name, tensor in replica.feedback().items()}
    optimizer_tensors, scalars = _optimizer_state(module, replica.optimizer)
    shared: dict[str, Tensor] = {}
    if replica.sync.keeps_replicas_equal:
        model = _model_tensors(module)
    else:
        own_sync, shared_sync = replica.sync_state()
        own |= {f"sync/{name}": tensor for name, tensor in own_sync.items()}
        shared = {f"sync/{name}": tensor for name, tensor in shared_sync.items()}
        own |= {f"model/{name}": parameter.detach() for name, parameter in module.named_parameters()}
        own |= optimizer_tensors
        optimizer_tensors = {}
        with replica.consensus():
            model = {name: tensor.clone() for name, tensor in _model_tensors(module).items()}
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
    read = _read(checkpoint, module, optimizer) if checkpoint is not None else None
    header = {"document": read[0], "shapes": read[1]} if read else None
    header = group.gather_documents(header, name="checkpoint")[0]
    if header is None:
        return None
    document: Document = header["document"]
    extra = (
        read[2]
        if read
        else {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, (shape, dtype) in header["shapes"].items()
            if not is_own(name)
        }
    )
    mine = {name: extra.pop(name) for name in list(extra) if is_own(name)}
    if group.size > 1:
        broadcast_tensors(_model_tensors(module).values(), group)
        broadcast_tensors((extra[name] for name in sorted(extra)), group)
    _load_worker_buffers(module, extra, document["num_workers"], group)
    shapes = {name: spec for name, spec in header["shapes"].items() if is_own(name)}
    own = hand_out_own(mine, shapes, document["num_workers"], group, to_all=not _is_same(document, replica))
    theirs = [of_kind(tensors, "optimizer") for tensors in own]
    states = theirs[group.rank] if _is_same(document, replica) else mean_of(theirs)
    extra |= {f"optimizer/{name}": tensor for name, tensor in states.items()}
    _load_optimizer(module, optimizer, extra, document["optimizer"]["scalars"])
    _load_replica(replica, document, own, of_kind(extra, "sync"))
    return document


def _is_same(document: Document, replica: Replica) -> bool:
    """Whether as many workers of the same rule saved the checkpoint."""
    return (document["replicas"][0]["sync"], document["num_workers"]) == (replica.sync.name, replica.group.size)


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
    is_same_rule = saved[0]["sync"] == replica.sync.name
    if is_same_rule:
        replica.load_sync_state([of_kind(tensors, "sync") for tensors in own], shared)
    else:
        replica.load_sync_state([], {})
    feedback = [of_kind(tensors, "feedback") for tensors in own]
    if saved[0]["codec"] == replica.codec:
        replica.load_feedback(feedback)
    elif document["has_feedback"]:
        _tell_dropped(saved[0]["codec"], document["num_workers"], replica)


def _gather_documents(replica: Replica) -> list[dict[str, Any]]:
    """Return the replicas' documents by rank; one where they are all the same."""
    mine = replica.state_dict()
    return [mine] if replica.sync.keeps_replicas_equal else replica.group.gather_documents(mine, name="replicas")


def _read(
    checkpoint: Checkpoint, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Document, Shapes, dict[str, Tensor]]:
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
    into: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in _model_tensors(module).items()}
    extra = {
        name: torch.empty(spec.shape, dtype=spec.dtype)
        for name, spec in checkpoint.list_tensors().items()
        if not name.startswith("model/")
    }
    checkpoint.load(into | extra)
    return document, shapes_of(extra), extra


def _model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters (a tied one once) and persistent buffers, by name."""
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return {name: parameter.detach() for name, parameter in module.named_parameters()} | buffers


def _optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the optimizer's tensors, and what else it keeps of each parameter."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    names = _names_by_index(module, optimizer)
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{names[index]}/{key}"] = value
            else:
                scalars.setdefault(names[index], {})[key] = value
    return tensors, scalars


def _names_by_index(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the name of the optimizer's i-th parameter at place i."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _load_optimizer(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Mapping[str, Any]],
) -> None:
    """Load per-parameter state; hyper-parameters stay those of the run's settings."""
    by_parameter: dict[str, dict[str, Any]] = {name: dict(state) for name, state in scalars.items()}
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
            by_parameter.setdefault(parameter, {})[key] = tensor
    indices = {name: index for index, name in enumerate(_names_by_index(module, optimizer))}
    state = {indices[name]: values for name, values in by_parameter.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


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
