"""State of a replica in the memory of its worker, from which workers go on when others are lost or join."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.checkpoint import TensorSpec
from paceline.compression.codec import ADDED
from paceline.parallel.zero_redundancy import local_optimizer
from paceline.replica.gathering import FORMAT
from paceline.replica.hashing import hash_tensor
from paceline.replica.named_tensors import list_settings, list_ties, model_tensors, optimizer_state
from paceline.replica.replica import Replica


@dataclass(frozen=True)
class MemoryState:
    """A captured state, which `restore` reads as it reads a checkpoint.

    Args:
        path: Words for where it is.
        document: Document of the state.
        tensors: Tensors by name; they may share memory with the module and the optimizer.
    """

    path: Path
    document: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def step(self) -> int:
        """Step after which it was captured."""
        return int(self.document["step"])

    def read_document(self) -> dict[str, Any]:
        """Return the document."""
        return dict(self.document)

    def list_tensors(self) -> dict[str, TensorSpec]:
        """Return shape and dtype of every tensor, by name."""
        return {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return a tensor, in host memory."""
        return self.tensors[name].detach().cpu().contiguous()


@dataclass(frozen=True)
class KeptReplica:
    """State that only this worker knows: it stays with the worker in the next group.

    Args:
        own: State of codecs and the rule; see `WorkerState.own_state`.
        model: Copies of buffers, and of parameters if the rule lets workers differ.
    """

    own: Mapping[str, Any]
    model: Mapping[str, Tensor]

    @classmethod
    def take(cls, replica: Replica) -> "KeptReplica":
        """Return what this worker keeps; nothing is exchanged."""
        parameters = dict(replica.module.named_parameters())
        kept = {name for name in parameters if not replica.sync.keeps_replicas_equal}
        tensors = model_tensors(replica.module)
        model = {name: t.clone() for name, t in tensors.items() if name in kept or name not in parameters}
        return cls(replica.state.own_state(), model)

    @torch.no_grad()
    def put_back(self, module: nn.Module) -> None:
        """Copy the model's part into a module, in which a new replica has put what rank 0 has."""
        tensors = model_tensors(module)
        for name, kept in self.model.items():
            tensors[name].copy_(kept)


def capture_alone(replica: Replica) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the document of a whole model's replica, as that of one worker; nothing is exchanged.

    They are named as `paceline.replica.state.capture` names them. Residuals of codecs are left out: each worker keeps
    its own (`KeptReplica`), and none may count twice.
    """
    module = replica.module
    sync, shared = replica.state.sync_state()
    kinds = {"feedback": replica.state.feedback(), "sync": sync, "shared": shared}
    tensors = {f"model/{name}": tensor for name, tensor in model_tensors(module).items()}
    optimizer, scalars = optimizer_state(module, local_optimizer(replica.optimizer))
    averages = replica.state.average.tensors if replica.state.average is not None else {}
    tensors |= optimizer | {f"ema/{name}": tensor for name, tensor in averages.items()}
    for kind, held in kinds.items():
        kept = {name: tensor for name, tensor in held.items() if name.rpartition("/")[2] not in ADDED}
        tensors |= {f"rank0/{kind}/{name}": tensor for name, tensor in kept.items()}
    about = {
        "optimizer": {
            "type": type(local_optimizer(replica.optimizer)).__name__,
            "scalars": scalars,
            "settings": [list_settings(replica.optimizer)],
        },
        "cut": replica.shard.describe(),
        "tied": list_ties(module),
        "parts": [[0]],
        "blocks": [{}],
        "states": [replica.state.document()],
        "state_of": [0],
    }
    return tensors, {"format": FORMAT, "replica": about}


def digest(tensors: Mapping[str, Tensor], replica: Replica) -> str:
    """Return a digest of what is the same on all workers at one step: if the rule lets them differ, its common state.

    Args:
        tensors: Tensors of `capture_alone`.
        replica: The captured replica.
    """
    kinds = {name for name in tensors if name.startswith("rank0/shared/")}
    if replica.sync.keeps_replicas_equal:
        kinds = {f"model/{name}" for name, _ in replica.module.named_parameters()}
    if replica.sync.keeps_replicas_equal and replica.state.keeps_optimizers_equal:
        kinds |= {name for name in tensors if name.startswith("optimizer/")}
    hashes = [f"{name} {hash_tensor(tensors[name]):x}" for name in sorted(kinds)]
    return hashlib.blake2b("\n".join(hashes).encode(), digest_size=16).hexdigest()
