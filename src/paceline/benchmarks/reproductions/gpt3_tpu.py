"""A model of 175 billion parameters on a TPU v3 pod in 9.2 days: what that needs, and what we predict."""

from typing import Any

from pydantic import Field

from paceline.benchmarks.reproductions.predicted import (
    GPT3,
    Amount,
    PredictedRow,
    PredictedTable,
    Steps,
    counted,
    predicted,
)
from paceline.registry import register
from paceline.topology import DEVICES

_FLOPS = 3.14e23
"""Flops of the training, as published: 6 x 175e9 parameters x 300e9 tokens."""
_DAYS = 9.2
_POD = 420e15
"""Flop/s of the pod, as published."""
_LAYOUTS = ((8, 8), (8, 16), (8, 32), (16, 8), (16, 16))
"""Tensor and pipeline ranks that are tried."""


@register("gpt3-tpu")
class GPT3OnTPU(PredictedTable):
    """GPT-3 175B in 9.2 days on a TPU v3 pod of "over 420 petaflop/s": the share of the peak that needs, and ours.

    Of a few layouts the fastest that fits is taken. No shipped row is of a TPU, so that intervals are wide.
    """

    num_tokens: float = Field(default=300e9, gt=0)
    """Tokens of the training."""
    global_batch: int = Field(default=2048, ge=1)
    """Sequences of 2,048 tokens in a step."""

    def reproduce(self) -> list[PredictedRow]:
        """Predict it."""
        chip = DEVICES["tpu_v3"].peak_flops["bf16"]
        needed = _FLOPS / (_DAYS * 86400)
        rows = [
            counted(
                "share of 420 petaflop/s that 9.2 days need",
                needed / _POD,
                "not stated",
                "more than products of matrices alone: the best known of an A100 is 271 of 312 Tflop/s",
            )
        ]
        for number in (1024, 2048):
            share = needed / (number * chip)
            note = f"{number:,} chips have {number * chip / 1e15:.0f} petaflop/s, not 420: "
            note += "impossible" if share > 1 else "as above"
            rows.append(counted(f"share of the peak of {number:,} chips that 9.2 days need", share, "not stated", note))
        for number in (1024,):
            days, layout = self._predict(number)
            shares = tuple(_FLOPS / (one * 86400) / (number * chip) for one in (days[0], days[2], days[1]))
            rows += [
                predicted(f"days on {number:,} chips", days, "9.2", f"{layout}; {days[0] / _DAYS:.2g} times as long"),
                predicted(f"share of the peak of {number:,} chips", (shares[0], shares[1], shares[2]), "not stated"),
            ]
        return rows

    def _predict(self, number: int) -> tuple[Amount, str]:
        rows = [self._row(number, tensor, pipeline) for tensor, pipeline in _LAYOUTS]
        steps = Steps(rows)
        fitting = [
            place for place in range(len(rows)) if steps.memory_bytes(place) < DEVICES["tpu_v3"].memory_bytes
        ] or range(len(rows))
        best = min(fitting, key=lambda place: float(steps.seconds[place]))
        tensor, pipeline = _LAYOUTS[best]
        num_steps = self.num_tokens / (self.global_batch * 2048)
        data = number // (tensor * pipeline)
        words = f"tensor {tensor} x pipeline {pipeline} x data {data}"
        return steps.times(best, num_steps / 86400), words

    def _row(self, number: int, tensor: int, pipeline: int) -> dict[str, Any]:
        return {
            "model": GPT3, "sample": {"tokens": 2048}, "device": "tpu_v3", "cluster": {"name": "tpu_v3_pod"},
            "num_ranks": number,
            "layout": {"data": number // (tensor * pipeline), "sharded": 1, "context": 1, "tensor": tensor,
                       "pipeline": pipeline},
            "pipeline": {"order": "1f1b", "stages_per_rank": 1}, "micro_batch": 1.0,
            "global_batch": float(self.global_batch), "precision": "bf16", "recompute": "full", "optimizer": "adamw",
        }  # fmt: skip
