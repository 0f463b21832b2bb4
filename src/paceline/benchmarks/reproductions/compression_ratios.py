"""Compression ratios of gradient codecs: published ones beside the bytes that ours send."""

from typing import Annotated

import torch
from pydantic import Field

from paceline.benchmarks.reproductions.predicted import PredictedRow, PredictedTable, Several, counted
from paceline.compression import Codec, Int8, NoCodec, OneBit, TopK
from paceline.registry import register


@register("compression-ratios")
class CompressionRatios(PredictedTable):
    """How many times fewer bytes a worker sends with top-k, 8 bits and 1 bit, among 2 workers and among more.

    Bytes are counted as our codecs send them, of one matrix. What is published beside it, the loss of accuracy on
    ImageNet, is not predicted: `paceline compare codecs` measures it on models of this machine's size.
    """

    shape: tuple[Annotated[int, Field(ge=1)], ...] = (2048, 1024)
    """Shape of the matrix."""
    num_workers: tuple[Several, ...] = (2, 16)

    def reproduce(self) -> list[PredictedRow]:
        """Count them."""
        codecs: dict[str, tuple[Codec, float, str]] = {
            "none": (NoCodec(), 1, ""),
            "top-k, 1 %": (TopK(density=0.01), 100, "an index goes with each value, so that 1 % is 2 % of the bytes"),
            "8 bits": (Int8(), 4, ""),
            "1 bit": (OneBit(), 32, ""),
        }
        shape = torch.Size(self.shape)
        rows = []
        for workers in self.num_workers:
            dense = NoCodec().wire_bytes(shape, workers)
            for name, (codec, published, why) in codecs.items():
                ours = dense / codec.wire_bytes(shape, workers)
                notes = [why] if why else []
                if name == "top-k, 1 %" and workers > 2:
                    notes.append(f"gathered from all {workers} workers, where dense gradients are added on the way")
                note = "; ".join(notes) if abs(ours / published - 1) > 0.02 else ""
                rows.append(counted(f"{name}, {workers} workers: ratio", ours, f"{published:g}", note))
        return rows
