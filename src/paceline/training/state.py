"""The complete state of a training, as named tensors and one JSON document, and back.

Tensors are named ``model/<parameter or buffer>``, ``optimizer/<parameter>/<key>`` and, for buffers that differ between
workers (BatchNorm's statistics), ``worker<rank>/<buffer>``, and for what a worker's codec holds back
``feedback<rank>/<parameter>/<site>``. Random streams need no state: every step seeds its own
from (seed, step, worker). Data that draws random numbers as it is read must seed them from the sample's index.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint import Checkpoint
from paceline.comm.group import Group
from paceline.errors import SettingsError
from paceline.training.batch_statistics import find_statistics, pool_moments, set_moments
from paceline.training.hashing import hash_tensor
from paceline.training.replica import Replica
from paceline.training.start import broadcast_tensors

Document = dict[str, Any]


class FeedbackDroppedWarning(UserWarning):
    """Codecs had held back gradients that cannot be used here."""


def capture(replica: Replica) -> tuple[dict[str, Tensor], Document]:
    """Return the tensors and the document of a replica. Every rank calls it; rank 0's is complete."""
    replica.flush()
    module, optimizer, group = replica.module, replica.optimizer, replica.group
    tensors = {f"model/{name}": tensor for name, tensor in _model_tensors(module).items()}
    scalars: dict[str, dict[str, Any]] = {}
    names = _names_by_index(module, optimizer)
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{names[index]}/{key}"] = value
            else:
                scalars.setdefault(names[index], {})[key] = value
    buffers = _capture_worker_buffers(module, group)
    feedback = _capture_feedback(replica.feedback(), group)
    tensors |= buffers | feedback
    return tensors, {
        "optimizer": {"type": type(optimizer).__name__, "scalars": scalars},
        "replica": replica.state_dict(),
        "num_workers": group.size,
        "worker_tensors": sorted(buffers),
    }


def restore(checkpoint: Checkpoint | None, replica: Replica) -> Document | None:
    """Load rank 0's `checkpoint` into the replica of every rank and return its document, None without one.

    Only rank 0 reads, so hosts need not share a file system.

    Raises:
        SettingsError: It is of another model or optimizer.
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
            if not name.startswith("feedback")
        }
    )
    feedback = {name: extra.pop(name) for name in list(extra) if name.startswith("feedback")}
    if group.size > 1:
        broadcast_tensors(_model_tensors(module).values(), group)
        broadcast_tensors((extra[name] for name in sorted(extra)), group)
    _load_optimizer(module, optimizer, extra, document["optimizer"]["scalars"])
    _load_worker_buffers(module, extra, document["num_workers"], group)
    replica.load_state_dict(document["replica"])
    shapes = {name: spec for name, spec in header["shapes"].items() if name.startswith("feedback")}
    if shapes and document["replica"]["codec"] != replica.codec:
        _tell_dropped(document, replica)
    elif shapes:
        replica.load_feedback(_hand_out_feedback(feedback, shapes, document["num_workers"], group))
    return document


def _read(
    checkpoint: Checkpoint, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Document, dict[str, tuple[list[int], str]], dict[str, Tensor]]:
    document = checkpoint.read_document()
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
    shapes = {name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in extra.items()}
    return document, shapes, extra


def _model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters (a tied one once) and persistent buffers, by name."""
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return {name: parameter.detach() for name, parameter in module.named_parameters()} | buffers


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


def _capture_feedback(mine: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Return, on rank 0, what the codecs of all ranks keep, as ``feedback<rank>/<parameter>/<site>``."""
    captured = {f"feedback0/{name}": tensor for name, tensor in mine.items()} if group.rank == 0 else {}
    shapes = {name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in mine.items()}
    everybody = group.gather_documents(shapes, name="feedback shapes")
    for rank in range(1, group.size):
        for tag, (name, (shape, dtype)) in enumerate(sorted(everybody[rank].items())):
            if group.rank == rank:
                group.send(mine[name].contiguous(), 0, tag=tag, name=f"feedback of {name}").wait()
            elif group.rank == 0:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
                group.receive(tensor, rank, tag=tag, name=f"feedback of {name}").wait()
                captured[f"feedback{rank}/{name}"] = tensor
    return captured


def _tell_dropped(document: Document, replica: Replica) -> None:
    if replica.group.rank == 0:
        here = f"codec {replica.codec!r}" if replica.codec else "no codec"
        warnings.warn(
            f"gradients that codec {document['replica']['codec']!r} of {document['num_workers']} workers had held back "
            f"are dropped, since {here} runs among {replica.group.size} here; resume with the same codec and more than "
            "one worker to keep them",
            FeedbackDroppedWarning,
            stacklevel=3,
        )


def _hand_out_feedback(
    read: Mapping[str, Tensor], shapes: Mapping[str, tuple[list[int], str]], num_saved: int, group: Group
) -> list[dict[str, Tensor]]:
    """Return what each saved worker's codec kept; where their number is as it was, only this rank's is filled in."""
    saved: list[dict[str, Tensor]] = [{} for _ in range(num_saved)]
    for name, (shape, dtype) in sorted(shapes.items()):
        place, _, rest = name.removeprefix("feedback").partition("/")
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
        if group.rank == 0:
            tensor.copy_(read[name])
        if group.size > 1:
            broadcast_tensors([tensor], group)
        if num_saved != group.size or int(place) == group.rank:
            saved[int(place)][rest] = tensor
    return saved
