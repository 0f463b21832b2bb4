"""Moving activations between the ranks that share matrices. Each operation is differentiable.

Megatron-LM's two operators, and their forms for split tokens (Shoeybi 2019; Korthikanti 2022), as redistributions of
DTensors. Activations are ``(..., tokens, features)``. Inputs and outputs are plain tensors, so that the code between
two operations runs as on one rank.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from paceline.errors import SettingsError
from paceline.parallel.loss_graph import mark_part
from paceline.parallel.second_order import differentiated_once


class Activations:
    """Distribution of the activations between blocks over the tensor axis.

    Either every rank holds all tokens, or (`cuts_tokens`) a part of them, which takes the memory of that part and the
    same bytes on the wire: an all-reduce is then a reduce-scatter here and an all-gather there. A sequence that cannot
    be split evenly stays whole if no gradients are needed (generation of text, for instance).

    Args:
        device_mesh: Device mesh of the tensor axis.
        cuts_tokens: Whether tokens are split between blocks.
    """

    def __init__(self, device_mesh: DeviceMesh, *, cuts_tokens: bool) -> None:
        self.device_mesh = device_mesh
        self.cuts_tokens = cuts_tokens
        self.keeps_logits_cut = False
        """Whether logits stay split over the vocabulary, for a loss that supports it."""
        self._is_cut = cuts_tokens  # in the present forward pass

    @property
    def place(self) -> int:
        """Index of this rank on the axis."""
        return self.device_mesh.get_local_rank()

    def gather(self, part: Tensor) -> Tensor:
        """Return all tokens of activations between blocks; their gradients are summed over the ranks."""
        return self._move(part, Shard(part.dim() - 2) if self._is_cut else Replicate(), Replicate(), Partial())

    def add(self, summand: Tensor) -> Tensor:
        """Return the sum over all ranks, for this rank's tokens between blocks."""
        self._decide(summand.shape[-2])
        total = self._move(summand, Partial(), Shard(summand.dim() - 2) if self._is_cut else Replicate())
        # A copy where the code is a stranger's: it may add to it in place, which autograd forbids for DTensor's views.
        return total if self.cuts_tokens else total.clone()

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of tokens that every rank has in full."""
        num_tokens = whole.shape[-2]
        self._decide(num_tokens)
        if not self._is_cut:
            return whole
        length = num_tokens // self.device_mesh.size()
        return mark_part(whole.narrow(-2, self.place * length, length))

    def join_features(self, part: Tensor) -> Tensor:
        """Return all features of activations of which each rank has some; all ranks go on with the same."""
        return self._move(part, Shard(part.dim() - 1), Replicate())

    def slice_features(self, whole: Tensor) -> Tensor:
        """Return this rank's features of activations that every rank has in full."""
        return self._move(whole, Replicate(), Shard(whole.dim() - 1))

    def finish(self, logits: Tensor) -> Tensor:
        """Return this rank's columns as a DTensor of all logits if the loss supports it, else all logits."""
        cut = DTensor.from_local(logits, self.device_mesh, [Shard(logits.dim() - 1)], run_check=False)
        return cut if self.keeps_logits_cut else cut.full_tensor()

    def _move(self, part: Tensor, source: Placement, target: Placement, gradient: Placement | None = None) -> Tensor:
        moved = DTensor.from_local(part, self.device_mesh, [source], run_check=False)
        if source != target:
            moved = moved.redistribute(placements=[target])
        own = moved.to_local(grad_placements=None if gradient is None else [gradient])
        return differentiated_once(own if target.is_replicate() else mark_part(own), "tensor")

    def _decide(self, num_tokens: int) -> None:
        if not self.cuts_tokens:
            return
        size = self.device_mesh.size()
        self._is_cut = num_tokens % size == 0
        if not self._is_cut and torch.is_grad_enabled():
            raise SettingsError(
                f"a sequence must be a multiple of tensor({size}) tokens, but got {num_tokens} = {size} * "
                f"{num_tokens // size} + {num_tokens % size}; choose {num_tokens - num_tokens % size} or "
                f"{num_tokens + size - num_tokens % size}"
            )
