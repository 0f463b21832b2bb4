"""How activations move between the ranks that share matrices. Each movement is differentiable.

Megatron-LM's two operators, and their forms for cut tokens (Shoeybi 2019; Korthikanti 2022), as redistributions of
DTensors. Activations are ``(..., tokens, features)``. Plain tensors go in and come out, so that what stands between
movements runs as it does on one rank.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from paceline.errors import SettingsError


class Activations:
    """What ranks along the tensor axis hold of the activations between blocks.

    Either every rank holds all tokens, or (`cuts_tokens`) its part of them, which needs the memory of a part and the
    same bytes on the wire: an all-reduce is then a reduce-scatter here and an all-gather there. A sequence that cannot
    be cut evenly stays whole where no gradients are wanted (generation of text, for instance).

    Args:
        device_mesh: That of the tensor axis.
        cuts_tokens: Whether tokens are cut between blocks.
    """

    def __init__(self, device_mesh: DeviceMesh, *, cuts_tokens: bool) -> None:
        self.device_mesh = device_mesh
        self.cuts_tokens = cuts_tokens
        self.keeps_logits_cut = False
        """Whether logits stay cut over the vocabulary, for a loss that can do with that."""
        self._is_cut = cuts_tokens  # in the present forward pass

    @property
    def place(self) -> int:
        """This rank's place on the axis."""
        return self.device_mesh.get_local_rank()

    def gather(self, part: Tensor) -> Tensor:
        """Return all tokens of what lies between blocks; gradients are summed over the ranks on the way back."""
        return self._move(part, Shard(part.dim() - 2) if self._is_cut else Replicate(), Replicate(), Partial())

    def add(self, summand: Tensor) -> Tensor:
        """Return the sum over all ranks, of the tokens that lie here between blocks."""
        self._decide(summand.shape[-2])
        return self._move(summand, Partial(), Shard(summand.dim() - 2) if self._is_cut else Replicate())

    def cut(self, whole: Tensor) -> Tensor:
        """Return what lies here between blocks, of tokens that every rank holds all of."""
        num_tokens = whole.shape[-2]
        self._decide(num_tokens)
        if not self._is_cut:
            return whole
        length = num_tokens // self.device_mesh.size()
        return whole.narrow(-2, self.place * length, length)

    def finish(self, logits: Tensor) -> Tensor:
        """Return this rank's columns as a DTensor of all logits where the loss can do with that, else all of them."""
        cut = DTensor.from_local(logits, self.device_mesh, [Shard(logits.dim() - 1)], run_check=False)
        return cut if self.keeps_logits_cut else cut.full_tensor()

    def list_values(self, value: Tensor) -> Tensor:
        """Return the numbers that the ranks have here, by place."""
        return self._move(value.detach().reshape(1), Shard(0), Replicate())

    def _move(self, part: Tensor, lies: Placement, shall_lie: Placement, gradient: Placement | None = None) -> Tensor:
        moved = DTensor.from_local(part, self.device_mesh, [lies], run_check=False)
        if lies != shall_lie:
            moved = moved.redistribute(placements=[shall_lie])
        return moved.to_local(grad_placements=None if gradient is None else [gradient])

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
