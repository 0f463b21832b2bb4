"""Speed of the network between the workers, measured on the exchanges that training makes anyway."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch

from paceline.comm.group import Group


@dataclass(frozen=True)
class LinkSpeed:
    """Cost of one exchange: its latency, and its bytes over the bandwidth."""

    latency_s: float
    """Time of an exchange of no bytes."""
    bytes_per_s: float
    """Bytes that a worker sends in a second."""

    def exchange_s(self, num_bytes: float) -> float:
        """Return the time of an exchange in which each worker sends `num_bytes`."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class TimedExchange:
    """One exchange of a step."""

    num_bytes: int
    """Bytes that this worker sent."""
    began_s: float
    ended_s: float


class LinkMeter:
    """Measures the link on the exchanges of the last steps; all workers come to the same numbers.

    An exchange that begins while another is under way counts from the end of that one, so that the times of a step add
    up to those in which the network was busy. An exchange takes as long as it took the worker that came last, since the
    others wait for it.

    Args:
        group: The workers.
        num_steps: Number of steps that are remembered.
    """

    def __init__(self, group: Group, num_steps: int) -> None:
        self._group = group
        self._steps: deque[list[tuple[int, float]]] = deque(maxlen=num_steps)

    def note_step(self, exchanges: Iterable[TimedExchange]) -> None:
        """Record the exchanges of a step, in the order in which they began; every worker records the same ones."""
        free_s, step = -math.inf, []
        for exchange in exchanges:
            step.append((exchange.num_bytes, max(0.0, exchange.ended_s - max(exchange.began_s, free_s))))
            free_s = max(free_s, exchange.ended_s)
        self._steps.append(step)

    def agree(self) -> LinkSpeed | None:
        """Return the speed, the same bits on each worker; None without exchanges. Every worker calls it."""
        if not any(self._steps):
            return None
        mine = torch.tensor(
            [s for step in self._steps for _, s in step], dtype=torch.float64, device=self._group.device
        )
        everybody = mine.new_empty(self._group.size, len(mine))
        self._group.all_gather(everybody, mine, name="times of exchanges").wait()
        shortest = iter(everybody.amin(dim=0).tolist())
        times: dict[int, list[float]] = {}
        for step in self._steps:
            by_size: dict[int, list[float]] = {}
            for num_bytes, _ in step:
                by_size.setdefault(num_bytes, []).append(next(shortest))
            for num_bytes, seconds in by_size.items():
                times.setdefault(num_bytes, []).append(fmean(seconds))
        return fit_speed([(num_bytes, median(seconds)) for num_bytes, seconds in times.items()])


def fit_speed(points: Sequence[tuple[int, float]]) -> LinkSpeed | None:
    """Return the speed at which exchanges of some bytes take some seconds, by least squares of the relative errors.

    Exchanges that took no time say nothing; those of one size are taken to have no latency.
    """
    known = [(float(num_bytes), seconds) for num_bytes, seconds in points if seconds > 0]
    if not known:
        return None
    # Divided by their seconds t, exchanges obey latency / t + bytes / (t * bandwidth) = 1.
    ones = [(1 / seconds, num_bytes / seconds) for num_bytes, seconds in known]
    a, b = sum(x for x, _ in ones), sum(y for _, y in ones)
    aa, ab, bb = sum(x * x for x, _ in ones), sum(x * y for x, y in ones), sum(y * y for _, y in ones)
    determinant = aa * bb - ab * ab
    is_clear = determinant > 1e-9 * aa * bb
    latency_s = max(0.0, (a * bb - b * ab) / determinant) if is_clear else 0.0
    seconds_per_byte = (b - latency_s * ab) / bb if bb else 0.0
    if seconds_per_byte <= 0:  # all of it is latency
        return LinkSpeed(median(seconds for _, seconds in known), math.inf)
    return LinkSpeed(latency_s, 1 / seconds_per_byte)
