"""A server's state, as one body of bytes, and as whole parameters that fit any number of servers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.sync.parameter_server.pieces import Pack, Piece

_LENGTH_BYTES = 64
"""Of the number that a body begins with: what follows stays aligned."""


def pack_state(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> Tensor:
    """Return named tensors and a JSON document as one body."""
    pieces = [Piece(name, 0, 0, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    listed = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]
    header = json.dumps({"tensors": listed, "document": document}).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    body = torch.zeros(_LENGTH_BYTES + len(header) + Pack.size_of(pieces), dtype=torch.uint8)
    body[:_LENGTH_BYTES] = torch.frombuffer(bytearray(b"%64d" % len(header)), dtype=torch.uint8)
    body[_LENGTH_BYTES : _LENGTH_BYTES + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    pack = Pack(pieces, 0, body[_LENGTH_BYTES + len(header) :])
    for target, tensor in zip(pack.tensors, tensors.values(), strict=True):
        target.copy_(tensor)
    return body


def unpack_state(body: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what `pack_state` made a body of; the tensors lie in it."""
    length = int(bytes(body[:_LENGTH_BYTES].numpy()))
    header = json.loads(bytes(body[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy()))
    pieces = [Piece(name, 0, 0, torch.Size(shape), getattr(torch, dtype)) for name, dtype, shape in header["tensors"]]
    pack = Pack(pieces, 0, body[_LENGTH_BYTES + length :])
    return {piece.name: tensor for piece, tensor in zip(pieces, pack.tensors, strict=True)}, header["document"]


def join_pieces(tensors: Mapping[str, Tensor], pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """Return the tensors of pieces by parameter: ``<kind>/<parameter>`` and ``<kind>/<parameter>/<key>``.

    Args:
        tensors: By ``<kind>/<piece>`` and ``<kind>/<piece>/<key>``; state of a cut parameter has its rows, or it is
            the same for all pieces (a count of steps).
        pieces: All there are.
    """
    joined: dict[str, list[Tensor]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.start):
        for name, tensor in _of_piece(tensors, piece):
            parts = joined.setdefault(name, [])
            if not parts or (piece.stop and tensor.shape == piece.shape):
                parts.append(tensor)
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in joined.items()}


def cut_pieces(tensors: Mapping[str, Tensor], pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """Return the part of each of the `pieces` of what `join_pieces` returned."""
    cut = {}
    for piece in pieces:
        whole = Piece(piece.parameter, 0, 0, piece.shape, piece.dtype)
        for name, tensor in _of_piece(tensors, whole):
            is_cut = piece.stop and tensor.shape[1:] == piece.shape[1:] and tensor.dim() == len(piece.shape)
            kind, _, rest = name.partition("/")
            new = f"{kind}/{piece.name}{rest.removeprefix(piece.parameter)}"
            cut[new] = piece.of(tensor) if is_cut else tensor
    return cut


def _of_piece(tensors: Mapping[str, Tensor], piece: Piece) -> list[tuple[str, Tensor]]:
    """Return the tensors of one piece, named after its parameter."""
    found = []
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if rest == piece.name or (kind != "parameter" and rest.rpartition("/")[0] == piece.name):
            found.append((f"{kind}/{piece.parameter}{rest.removeprefix(piece.name)}", tensor))
    return found
