"""Bucket size by measurement: small buckets are sent earlier, large ones cost fewer calls."""

import statistics
from collections.abc import Mapping

import torch
from torch import nn

from paceline.comm.group import Group

_STEPS_EACH = 6
_SKIPPED = 2
"""Steps after a change that are not measured: new buffers are touched for the first time."""


class BucketTuner:
    """Tries bucket sizes for a few steps each, and keeps the one whose steps were shortest on the slowest worker.

    Candidates larger than the whole model are not tried. Every rank must measure at the same steps.
    """

    first_bytes = 16 * 2**20

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Group) -> None:
        total_bytes = sum(parameter.nbytes for parameter in parameters.values())
        smaller = [size for size in (2**20, 4 * 2**20, 64 * 2**20) if size < 2 * total_bytes]
        self._candidates = [self.first_bytes, *smaller]
        self._group = group
        self._times_s: list[float] = []
        self._medians_s: list[float] = []
        self.is_done = len(self._candidates) == 1

    def measure(self, step_s: float) -> int | None:
        """Count a step; return the new bucket size in bytes, if it changes."""
        if self.is_done:
            return None
        self._times_s.append(step_s)
        if len(self._times_s) < _STEPS_EACH:
            return None
        self._medians_s.append(self._agree(statistics.median(self._times_s[_SKIPPED:])))
        self._times_s = []
        tried = len(self._medians_s)
        if tried < len(self._candidates):
            return self._candidates[tried]
        self.is_done = True
        return self._candidates[self._medians_s.index(min(self._medians_s))]

    def _agree(self, median_s: float) -> float:
        """Return the largest of all workers' medians, the same bits on each."""
        mine = torch.tensor([median_s], dtype=torch.float64, device=self._group.device)
        everybody = mine.new_empty(self._group.size, 1)
        self._group.all_gather(everybody, mine, name="step times").wait()
        return float(everybody.max())
