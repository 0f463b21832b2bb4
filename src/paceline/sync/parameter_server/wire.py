"""What pushes and pulls look like in bytes: tensors as they are, or through a codec, and a few numbers behind them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.compression import Codec, NoCodec
from paceline.compression.codec import RESIDUALS, State
from paceline.compression.message import decode_blocks, encode_blocks, message_bytes
from paceline.errors import SettingsError
from paceline.sync.parameter_server.pieces import Pack, Piece, copy_all

States = dict[str, State]
"""What a codec keeps, by piece."""


class Wire:
    """One direction between a worker and a server.

    Args:
        codec: How tensors are made smaller.
        pieces: Whose tensors travel.
        num_numbers: float64 numbers that go with them.
        seed: Of what the codec draws.
    """

    def __init__(self, codec: Codec, pieces: Sequence[Piece], num_numbers: int = 0, seed: int = 0) -> None:
        self._codec = codec
        self._pieces = list(pieces)
        self._num_numbers = num_numbers
        self._seed = seed
        self._shapes = {piece.name: piece.shape for piece in pieces}
        self.is_exact = isinstance(codec, NoCodec)
        self._packs: dict[int, Pack] = {}
        """Those that lie in bodies seen before, by address."""
        if not self.is_exact and any(piece.dtype.is_complex for piece in pieces):
            raise SettingsError(f"parameters must be real for codec {codec.name!r}, but some are complex; use none")

    @property
    def num_bytes(self) -> int:
        """Size of a body."""
        if self.is_exact:
            return Pack.size_of(self._pieces, self._num_numbers)
        return message_bytes(self._codec, self._shapes) + 8 * self._num_numbers

    @property
    def price(self) -> int:
        """Size of what the tensors are in a body: what a rule states as its traffic."""
        if self.is_exact:
            return sum(piece.num_bytes for piece in self._pieces)
        return message_bytes(self._codec, self._shapes)

    def new_body(self) -> Tensor:
        """Return a body to be filled."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8)

    def view(self, body: Tensor) -> Pack:
        """Return the tensors and numbers that lie in a body, where there is no codec."""
        pack = self._packs.get(body.data_ptr())
        if pack is None or len(pack.bytes) != len(body):
            pack = self._packs[body.data_ptr()] = Pack(self._pieces, self._num_numbers, body)
        return pack

    def write(
        self, body: Tensor, tensors: Sequence[Tensor], numbers: Sequence[float], states: States, step: int
    ) -> States:
        """Fill a body, and return the states to keep once it has arrived."""
        if self.is_exact:
            pack = self.view(body)
            copy_all(pack.tensors, tensors)
            pack.numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
            return states
        values = {piece.name: tensor.float() for piece, tensor in zip(self._pieces, tensors, strict=True)}
        message, done = encode_blocks(self._codec, values, states, step=step, seed=self._seed)
        body[: len(message)] = message
        body[len(message) :] = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
        return {name: exchanged.state for name, exchanged in done.items()}

    def read(self, body: Tensor, step: int) -> tuple[list[Tensor], list[float]]:
        """Return the tensors and numbers of a body; without a codec the tensors lie in it."""
        if self.is_exact:
            pack = self.view(body)
            return pack.tensors, pack.numbers.tolist()
        length = len(body) - 8 * self._num_numbers
        decoded = decode_blocks(self._codec, body[:length], self._shapes, step=step, seed=self._seed)
        tensors = [decoded[piece.name].to(piece.dtype) for piece in self._pieces]
        return tensors, body[length:].clone().view(torch.float64).tolist()


def make_wires(
    codec: Codec, pull_codec: Codec, pieces: Sequence[Piece], num_groups: int, seed: int
) -> tuple[Wire, Wire]:
    """Return the wires of pushes and of pulls: with what is pushed go learning rates, and what was used."""
    return Wire(codec, pieces, num_groups + len(pieces), seed), Wire(pull_codec, pieces, 0, seed)


def without_residuals(states: Mapping[str, State]) -> States:
    """Return states without what was held back, where the next difference has that in it anyway."""
    return {
        name: {site: kept for site, kept in state.items() if site not in RESIDUALS} for name, state in states.items()
    }
