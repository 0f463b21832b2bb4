"""The bytes of pushes and pulls: tensors, encoded if there is a codec, and a few numbers after them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.compression import Codec, NoCodec
from paceline.compression.codec import RESIDUALS, State
from paceline.compression.message import decode_blocks, encode_blocks, message_bytes
from paceline.errors import SettingsError
from paceline.sync.parameter_server.blocks import PackedTensors, ParameterBlock, copy_all

States = dict[str, State]
"""Codec states, by block."""


class WireFormat:
    """Wire format of one direction between a worker and a server.

    Args:
        codec: Codec of the tensors.
        blocks: Blocks of the tensors.
        num_numbers: Number of float64 numbers after them.
        seed: Random seed of the codec.
    """

    def __init__(self, codec: Codec, blocks: Sequence[ParameterBlock], num_numbers: int = 0, seed: int = 0) -> None:
        self._codec = codec
        self._blocks = list(blocks)
        self._num_numbers = num_numbers
        self._seed = seed
        self._shapes = {block.name: block.shape for block in blocks}
        self.is_exact = isinstance(codec, NoCodec)
        self._packed: dict[int, PackedTensors] = {}
        """Tensors in bodies seen before, by address."""
        if not self.is_exact and any(block.dtype.is_complex for block in blocks):
            raise SettingsError(f"parameters must be real for codec {codec.name!r}, but some are complex; use none")

    @property
    def num_bytes(self) -> int:
        """Size of a body."""
        if self.is_exact:
            return PackedTensors.size_of(self._blocks, self._num_numbers)
        return message_bytes(self._codec, self._shapes) + 8 * self._num_numbers

    @property
    def price(self) -> int:
        """Bytes of the tensors in a body: the traffic that a rule states."""
        if self.is_exact:
            return sum(block.num_bytes for block in self._blocks)
        return message_bytes(self._codec, self._shapes)

    def new_body(self) -> Tensor:
        """Return a body to be filled."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8)

    def view(self, body: Tensor) -> PackedTensors:
        """Return the tensors and numbers in a body, if there is no codec."""
        packed = self._packed.get(body.data_ptr())
        if packed is None or len(packed.bytes) != len(body):
            packed = self._packed[body.data_ptr()] = PackedTensors(self._blocks, self._num_numbers, body)
        return packed

    def write(
        self, body: Tensor, tensors: Sequence[Tensor], numbers: Sequence[float], states: States, step: int
    ) -> States:
        """Fill a body, and return the states to keep once it has arrived."""
        if self.is_exact:
            packed = self.view(body)
            copy_all(packed.tensors, tensors)
            packed.numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
            return states
        values = {block.name: tensor.float() for block, tensor in zip(self._blocks, tensors, strict=True)}
        message, done = encode_blocks(self._codec, values, states, step=step, seed=self._seed)
        body[: len(message)] = message
        body[len(message) :] = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
        return {name: exchanged.state for name, exchanged in done.items()}

    def read(self, body: Tensor, step: int) -> tuple[list[Tensor], list[float]]:
        """Return the tensors and numbers of a body; without a codec the tensors are views of it."""
        if self.is_exact:
            packed = self.view(body)
            return packed.tensors, packed.numbers.tolist()
        length = len(body) - 8 * self._num_numbers
        decoded = decode_blocks(self._codec, body[:length], self._shapes, step=step, seed=self._seed)
        tensors = [decoded[block.name].to(block.dtype) for block in self._blocks]
        return tensors, body[length:].clone().view(torch.float64).tolist()


def make_wire_formats(
    codec: Codec, pull_codec: Codec, blocks: Sequence[ParameterBlock], num_groups: int, seed: int
) -> tuple[WireFormat, WireFormat]:
    """Return the wire formats of pushes and of pulls; pushes include learning rates, and which blocks were used."""
    return WireFormat(codec, blocks, num_groups + len(blocks), seed), WireFormat(pull_codec, blocks, 0, seed)


def without_residuals(states: Mapping[str, State]) -> States:
    """Return states without residuals, for differences that include the residual anyway."""
    return {
        name: {site: kept for site, kept in state.items() if site not in RESIDUALS} for name, state in states.items()
    }
