"""One rank's part of a state as bytes, and a checkpoint made of all parts in memory.

A part is the length of its header (8 bytes, little-endian), the header (JSON: step, document, blocks of tensors), and
the blocks' bytes, each aligned. Nothing is pickled.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint import TensorSpec
from paceline.checkpoint.galois import Bytes
from paceline.checkpoint.manifest import DTYPE_NAMES, DTYPES
from paceline.checkpoint.storage import TensorBlock
from paceline.checkpoint.tensor_file import byte_slices

_ALIGNMENT = 64


class StatePart:
    """A rank's blocks of tensors, with the document, ready to be written as bytes."""

    def __init__(self, blocks: Mapping[str, Sequence[TensorBlock]], document: Mapping[str, Any], step: int) -> None:
        self._tensors: list[tuple[int, Tensor]] = []
        records, position = [], 0
        for name, one in ((name, block) for name, several in blocks.items() for block in several):
            tensor = one.tensor.detach()
            records.append((name, DTYPE_NAMES[tensor.dtype], one.whole, one.offsets, tuple(tensor.shape), position))
            self._tensors.append((position, tensor))
            position = _align(position + tensor.nbytes)
        text = json.dumps({"step": step, "document": document, "blocks": records}).encode()
        self._header = struct.pack("<Q", len(text)) + text
        self._begin = _align(len(self._header))
        self.num_bytes = self._begin + position
        """Size of the part."""

    def write(self, memory: Bytes) -> None:
        """Write the part at the beginning of `memory`, and zeros after it."""
        memory[: len(self._header)] = memoryview(self._header)
        for start, tensor in self._tensors:
            place = self._begin + start
            for content in byte_slices(tensor):
                memory[place : place + len(content)] = content
                place += len(content)
        memory[self.num_bytes :] = 0


class MemoryCheckpoint:
    """A checkpoint whose tensors are in this process's memory; it reads like one on disk."""

    def __init__(self, path: Path, parts: Sequence[Bytes]) -> None:
        """Make a checkpoint.

        Args:
            path: Place that messages name.
            parts: Parts of all ranks, by rank; they are whole.
        """
        self.path = path
        self._blocks: dict[str, list[tuple[str, list[int], list[int], list[int], Bytes]]] = {}
        headers = []
        for part in parts:
            (length,) = struct.unpack("<Q", part[:8].tobytes())
            headers.append(json.loads(part[8 : 8 + length].tobytes()))
            begin = _align(8 + length)
            for name, dtype, whole, offsets, shape, start in headers[-1]["blocks"]:
                self._blocks.setdefault(name, []).append((dtype, whole, offsets, shape, part[begin + start :]))
        self.step: int = headers[0]["step"]
        """Step after which the state was copied."""
        self._document: dict[str, Any] = headers[0]["document"]

    def read_document(self) -> dict[str, Any]:
        """Return the first rank's document."""
        return dict(self._document)

    def list_tensors(self) -> dict[str, TensorSpec]:
        """Return shape and dtype of every full tensor, by name."""
        return {
            name: TensorSpec(torch.Size(several[0][1]), DTYPES[several[0][0]]) for name, several in self._blocks.items()
        }

    def read(self, name: str) -> Tensor:
        """Return one full tensor, in memory of its own."""
        dtype, whole, *_ = self._blocks[name][0]
        tensor = torch.empty(whole, dtype=DTYPES[dtype])
        for _, _, offsets, shape, content in self._blocks[name]:
            target = tensor
            for dim, (first, length) in enumerate(zip(offsets, shape, strict=True)):
                target = target.narrow(dim, first, length)
            num_bytes = target.numel() * target.element_size()
            if num_bytes:
                target.copy_(torch.from_numpy(content[:num_bytes]).view(DTYPES[dtype]).view(shape))
        return tensor


def _align(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
