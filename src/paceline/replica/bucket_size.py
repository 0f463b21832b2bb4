"""Bucket size by the link: small buckets leave earlier, large ones cost fewer exchanges."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from paceline.comm.group import Group
from paceline.comm.link_speed import LinkMeter, LinkSpeed, TimedExchange
from paceline.replica.buckets import BucketLayout
from paceline.replica.step_result import BucketChoice, BucketTimes

SIZES = tuple(2**exponent for exponent in range(20, 27))
"""Sizes to choose from: 1 to 64 MiB."""
FIRST_SIZE = 4 * 2**20
"""Size until the choice, and where none is better."""
_LEAST_GAIN = 0.01
"""Least gain, to the time from the first gradient to the last sum, for which the size changes."""
_SKIPPED = 1
"""Steps after a new layout that are not measured: its buffers are touched for the first time."""
_MEASURED = 3


@dataclass(frozen=True)
class BackwardPass:
    """Moments at which a backward pass makes gradients."""

    num_bytes: Mapping[str, float]
    """Bytes that are sent for each parameter."""
    ready_s: Mapping[str, float]
    """Time at which each parameter's gradient is ready, since the first was."""
    launch_s: float = 0.0
    """Time that the worker takes to launch a bucket."""

    def exchanged_s(self, layout: BucketLayout, link: LinkSpeed) -> float:
        """Return the time at which the last bucket has been summed, if each follows the one before."""
        free_s = 0.0
        for number, names in enumerate(layout):
            ready_s = max(self.ready_s[name] for name in names) + (number + 1) * self.launch_s
            free_s = max(free_s, ready_s) + link.exchange_s(sum(self.num_bytes[name] for name in names))
        return free_s


def choose_bucket_bytes(backward: BackwardPass, link: LinkSpeed, plan: Callable[[int], BucketLayout]) -> BucketChoice:
    """Return the size of buckets with which the last gradient is summed soonest.

    `FIRST_SIZE` stands, unless another is clearly better.

    Args:
        backward: Backward pass.
        link: Speed of the exchanges.
        plan: Function that returns the layout with buckets of some size.
    """
    needs = {size: backward.exchanged_s(plan(size), link) for size in (FIRST_SIZE, *SIZES)}
    best = min(needs, key=lambda size: needs[size])
    if needs[best] > (1 - _LEAST_GAIN) * needs[FIRST_SIZE]:
        best = FIRST_SIZE
    reason = (
        f"buckets of {best // 2**20} MiB are summed {1e3 * needs[best]:.0f} ms after the first gradient, those of "
        f"{FIRST_SIZE // 2**20} MiB {1e3 * needs[FIRST_SIZE]:.0f} ms: backward makes gradients for "
        f"{1e3 * max(backward.ready_s.values()):.0f} ms, and a worker sends "
        f"{sum(backward.num_bytes.values()) / 2**20:.1f} MiB at {8e-6 * link.bytes_per_s:.0f} Mbit/s, with "
        f"{1e3 * link.latency_s:.1f} ms more for each bucket"
    )
    return BucketChoice(best, reason)


class BucketSizer:
    """Measures a few steps, and chooses with all workers, by the slowest of them.

    Args:
        group: The workers.
        num_bytes: Bytes that are sent for each parameter.
    """

    def __init__(self, group: Group, num_bytes: Mapping[str, float]) -> None:
        self._group = group
        self._num_bytes = num_bytes
        self._link = LinkMeter(group, _MEASURED)
        self._skipped = 0
        self._ready_s: list[list[float]] = []
        self._launches_s: list[float] = []
        self.keeps = False
        """Whether the size must stay, since this worker's state was read: who resumes from it has no other."""

    def measure(
        self, buckets: Sequence[BucketTimes], ready_s: Mapping[str, float], launches_s: Sequence[float]
    ) -> bool:
        """Record a step; return whether enough are. Every worker calls it at the same step.

        Args:
            buckets: Times of the buckets, in launch order.
            ready_s: Time at which each parameter's gradient was ready, in any order; without those that had none.
            launches_s: Time that each launch took.
        """
        if self._skipped < _SKIPPED:
            self._skipped += 1
            return False
        self._link.note_step(TimedExchange(one.wire_bytes, one.began_s, one.ended_s) for one in buckets)
        first_s, last_s = min(ready_s.values(), default=0.0), max(ready_s.values(), default=0.0)
        self._ready_s.append([ready_s.get(name, last_s) - first_s for name in self._num_bytes])
        self._launches_s += launches_s
        return len(self._ready_s) == _MEASURED

    def agree(self, plan: Callable[[int], BucketLayout]) -> BucketChoice | None:
        """Return the size that is best for the slowest worker, the same on each.

        None if it must stay, or if nothing is known: without exchanges, or where larger ones seem to take no longer, as
        on a busy machine.
        """
        link = self._link.agree()
        mine = [median(times) for times in zip(*self._ready_s, strict=True)] + [median(self._launches_s)]
        sent = torch.tensor([*mine, float(self.keeps)], dtype=torch.float64, device=self._group.device)
        everybody = sent.new_empty(self._group.size, len(sent))
        self._group.all_gather(everybody, sent, name="times of gradients").wait()
        *ready_s, launch_s, keeps = everybody.amax(dim=0).tolist()
        if keeps or link is None or math.isinf(link.bytes_per_s):
            return None
        backward = BackwardPass(self._num_bytes, dict(zip(self._num_bytes, ready_s, strict=True)), launch_s)
        return choose_bucket_bytes(backward, link, plan)
