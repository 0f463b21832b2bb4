"""A server's state, as one body of bytes, and as whole parameters for any number of servers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.sync.parameter_server.blocks import PackedTensors, ParameterBlock

_LENGTH_BYTES = 64
"""Bytes of the length at the beginning of a body: the rest stays aligned."""


def pack_state(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> Tensor:
    """Return named tensors and a JSON document as one body."""
    blocks = [ParameterBlock(name, 0, 0, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    listed = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]
    header = json.dumps({"tensors": listed, "document": document}).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    body = torch.zeros(_LENGTH_BYTES + len(header) + PackedTensors.size_of(blocks), dtype=torch.uint8)
    body[:_LENGTH_BYTES] = torch.frombuffer(bytearray(b"%64d" % len(header)), dtype=torch.uint8)
    body[_LENGTH_BYTES : _LENGTH_BYTES + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    packed = PackedTensors(blocks, 0, body[_LENGTH_BYTES + len(header) :])
    for target, tensor in zip(packed.tensors, tensors.values(), strict=True):
        target.copy_(tensor)
    return body


def unpack_state(body: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the document of a body from `pack_state`; the tensors are views of it."""
    length = int(bytes(body[:_LENGTH_BYTES].numpy()))
    header = json.loads(bytes(body[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy()))
    blocks = [
        ParameterBlock(name, 0, 0, torch.Size(shape), getattr(torch, dtype)) for name, dtype, shape in header["tensors"]
    ]
    packed = PackedTensors(blocks, 0, body[_LENGTH_BYTES + length :])
    return {block.name: tensor for block, tensor in zip(blocks, packed.tensors, strict=True)}, header["document"]


def join_blocks(tensors: Mapping[str, Tensor], blocks: Sequence[ParameterBlock]) -> dict[str, Tensor]:
    """Return the tensors of blocks by parameter: ``<kind>/<parameter>`` and ``<kind>/<parameter>/<key>``.

    Args:
        tensors: Tensors by ``<kind>/<block>`` and ``<kind>/<block>/<key>``; state of a split parameter has its rows, or
            is the same for all blocks (a count of steps).
        blocks: All blocks.
    """
    joined: dict[str, list[Tensor]] = {}
    for block in sorted(blocks, key=lambda block: block.start):
        for name, tensor in _of_block(tensors, block):
            parts = joined.setdefault(name, [])
            if not parts or (block.stop and tensor.shape == block.shape):
                parts.append(tensor)
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in joined.items()}


def join_servers(
    bodies: Mapping[int, Tensor], blocks_by_server: Sequence[Sequence[ParameterBlock]]
) -> dict[str, Tensor]:
    """Return the states of all servers as tensors by parameter, and a document of each as ``document/<number>``.

    Args:
        bodies: States from servers, by number.
        blocks_by_server: Blocks of each server.
    """
    tensors: dict[str, Tensor] = {}
    documents: dict[str, Tensor] = {}
    for number, body in bodies.items():
        saved, document = unpack_state(body)
        tensors |= saved
        documents[f"document/{number}"] = pack_state({}, document)
    return join_blocks(tensors, [block for blocks in blocks_by_server for block in blocks]) | documents


def cut_blocks(tensors: Mapping[str, Tensor], blocks: Sequence[ParameterBlock]) -> dict[str, Tensor]:
    """Return each block's part of the result of `join_blocks`."""
    cut = {}
    for block in blocks:
        whole = ParameterBlock(block.parameter, 0, 0, block.shape, block.dtype)
        for name, tensor in _of_block(tensors, whole):
            is_cut = block.stop and tensor.shape[1:] == block.shape[1:] and tensor.dim() == len(block.shape)
            kind, _, rest = name.partition("/")
            new = f"{kind}/{block.name}{rest.removeprefix(block.parameter)}"
            cut[new] = block.of(tensor) if is_cut else tensor
    return cut


def _of_block(tensors: Mapping[str, Tensor], block: ParameterBlock) -> list[tuple[str, Tensor]]:
    """Return the tensors of one block, named after its parameter."""
    found = []
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if rest == block.name or (kind != "parameter" and rest.rpartition("/")[0] == block.name):
            found.append((f"{kind}/{block.parameter}{rest.removeprefix(block.name)}", tensor))
    return found
