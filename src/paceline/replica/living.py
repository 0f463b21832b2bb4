"""State of a replica that ranks of a layout hold in memory, each its slices of it, and from which all go on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint import TensorSpec
from paceline.comm.group import Group
from paceline.errors import CommunicationError
from paceline.replica.gathering import Slice, trade

Document = dict[str, Any]


@dataclass(frozen=True)
class KeptPart:
    """One rank's part of the state after `step` updates, kept when the group of the ranks has ended.

    Args:
        step: Number of updates.
        held: Slices of tensors that the rank holds, by name; the module of a session that has ended may share them.
        own: State of the rank's replica, as JSON; see `paceline.replica.state.describe`.
        progress: Document of what belongs to no replica.
    """

    step: int
    held: Mapping[str, tuple[Slice, Tensor]]
    own: Document
    progress: Document


@dataclass(frozen=True)
class LivingState:
    """The state of all ranks, which `restore` reads as it reads a checkpoint, but from the ranks that hold it.

    A rank that holds a slice that it needs keeps it; nothing else moves than what a rank without memory needs.

    Args:
        step: Number of updates.
        document: Document of the state.
        held: Slices that this rank holds, by name.
        whole: Whole tensors, by name.
        objects: Tensors that belong to no replica, on rank 0.
        healed: Ranks that have sent this rank something.
    """

    step: int
    document: Document
    held: Mapping[str, tuple[Slice, Tensor]]
    whole: Mapping[str, Slice]
    objects: Mapping[str, Tensor]
    healed: set[int] = field(default_factory=set)
    path: Path = Path("memory")

    def read_document(self) -> Document:
        """Return the document."""
        return dict(self.document)

    def list_tensors(self) -> dict[str, TensorSpec]:
        """Return shape and dtype of every whole tensor, by name."""
        return {name: TensorSpec(torch.Size(one.whole), getattr(torch, one.dtype)) for name, one in self.whole.items()}

    def read(self, name: str) -> Tensor:
        """Return a tensor that belongs to no replica, on rank 0."""
        return self.objects[name]

    def trade(self, wanted: Mapping[str, Slice], group: Group) -> Iterator[tuple[str, Tensor]]:
        """Yield the slices that this rank wants, from itself or another one; every rank must take all of them."""
        for name, tensor, source in trade(wanted, self.held, group):
            if source != group.rank:
                self.healed.add(source)
            yield name, tensor


class LostPartError(CommunicationError):
    """A part of the state is in no rank's memory, or only after another update than the others."""


def find_newest(steps: Sequence[Sequence[int]], peers: Sequence[Sequence[int]]) -> int:
    """Return the most advanced step of which each part of the model is left.

    Args:
        steps: Numbers of updates after which each rank has its part, by rank; none for a new rank.
        peers: Ranks that hold the same part as each rank, by rank.

    Raises:
        LostPartError: There is none.
    """
    known = {step for held in steps for step in held}
    for step in sorted(known, reverse=True):
        if all(any(step in steps[other] for other in others) for others in peers):
            return step
    lost = [rank for rank, others in enumerate(peers) if not any(steps[other] for other in others)]
    raise LostPartError(
        f"a rank with each part of the model must be left, but none is for those of ranks {lost}; all must start again"
        if lost
        else f"ranks must hold their parts after the same update, but have {[*steps]}; all must start again"
    )
