"""What was measured of a model and of machines, and steps that follow from it."""

from collections.abc import Sequence
from math import log
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from paceline.errors import SettingsError
from paceline.registry import Settings
from paceline.topology import Cluster, Precision

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
FIRST_BUCKET_BYTES = 2**20
"""Size of the first bucket at most, so that an exchange begins early."""
SPREAD = 0.08
"""Standard deviation of the logarithm of a step around what a profile of the same number of workers says."""
OTHER_SPREAD = 0.15
"""The same for another number of workers than was measured."""


class ProfiledMachine(Settings):
    """Machine that was measured."""

    host: str
    """Name of it."""
    processor: str
    """Model of its processor, or of its GPU."""
    num_cores: Count
    """Cores that the process could use."""
    torch: str
    """Version of torch."""


class ProfiledProduct(Settings):
    """Speed of a product of matrices, (rows x depth) by (depth x columns), while all workers compute it."""

    rows: Count
    """Rows of the first matrix."""
    columns: Count
    """Columns of the second."""
    depth: Count
    """Length that is summed over."""
    num_threads: Count
    """Threads of each worker."""
    flops_per_s: float = Field(gt=0)
    """Flops of one worker in a second."""


class ProfiledExchange(Settings):
    """All-reduce of all workers, while none computes."""

    num_bytes: Count
    """Size of the buffer."""
    wall_s: Seconds
    """Time until the slowest has it."""
    cpu_s: Seconds
    """Time of the processor that a worker spends on it, which computing beside it lacks."""


class ProfiledLink(Settings):
    """Messages between two workers, one way."""

    ranks: tuple[int, int]
    """Ranks of both."""
    latency_s: Seconds
    """Time of a message of no bytes."""
    bytes_per_s: float = Field(gt=0)
    """Bytes that one sends the other in a second."""


class ProfiledBlock(Settings):
    """A block's times in the larger of both micro-batches."""

    name: str
    """Name of it."""
    num_bytes: float = Field(ge=0)
    """Bytes of its gradients."""
    forward_s: Seconds
    """Time of forward."""
    backward_s: Seconds
    """Time of backward."""


class ProfiledModel(Settings):
    """Times of a model's step without exchanges, while all workers compute."""

    digest: str
    """Identifier of the model's trace."""
    title: str
    """Name for people."""
    precision: Precision = "fp32"
    """Precision of forward."""
    samples: tuple[Count, Count]
    """Samples of both micro-batches that were measured."""
    forward_s: tuple[Seconds, Seconds]
    """Time of forward and loss of each."""
    backward_s: tuple[Seconds, Seconds]
    """Time of backward of each."""
    optimizer_s: Seconds
    """Time of the replica's update: clipping, checks and optimizer."""
    step_s: Seconds
    """Time of a whole step of all workers with the smaller micro-batch, exchanges included."""
    num_bytes: float = Field(gt=0)
    """Bytes of all gradients."""
    blocks: tuple[ProfiledBlock, ...]
    """Blocks of it, in the order of forward."""

    def compute_s(self, samples: float) -> tuple[float, float]:
        """Return the times of forward and backward of a micro-batch, linear between and beyond those measured."""
        return _line(self.samples, self.forward_s, samples), _line(self.samples, self.backward_s, samples)


class Profile(Settings):
    """Measurements of a model and of the workers that train it."""

    version: Literal[1] = 1
    """Version of the form."""
    machine: ProfiledMachine
    """Machine that rank 0 was on."""
    num_workers: Count
    """Workers that measured together."""
    num_threads: Count
    """Threads of each."""
    cluster: Cluster
    """Machine as a cluster, with measured speeds."""
    products: tuple[ProfiledProduct, ...]
    """Products of matrices by shape and threads."""
    memory_bytes_per_s: float = Field(gt=0)
    """Bytes that a worker reads and writes in a second while all do."""
    launch_s: float = Field(gt=0)
    """Time of the smallest operator."""
    links: tuple[ProfiledLink, ...] = ()
    """Messages between each two workers."""
    exchanges: tuple[ProfiledExchange, ...] = ()
    """All-reduces by size."""
    model: ProfiledModel
    """Times of the model."""

    def predict(
        self, samples: float, num_workers: int, num_micro_batches: float = 1, bucket_bytes: float = 4 * 2**20
    ) -> dict[str, float]:
        """Return the seconds of each term of a step of data-parallel workers.

        Buckets leave in the order in which backward makes gradients, one after another. Of an exchange, the time of
        the processor is taken from computing, and the rest is hidden as long as backward lasts.

        Args:
            samples: Samples of a worker in a step.
            num_workers: Number of workers.
            num_micro_batches: Micro-batches among which these are divided.
            bucket_bytes: Size of buckets.

        Raises:
            SettingsError: Exchanges were not measured, since there was one worker.
        """
        factor = self._slow_down(num_workers)
        forward, backward = (factor * one for one in self.model.compute_s(samples / num_micro_batches))
        terms = {
            "forward": forward * num_micro_batches,
            "backward": backward * num_micro_batches,
            "optimizer": self.model.optimizer_s * factor,
        }
        if num_workers > 1:
            if not self.exchanges:
                raise SettingsError(
                    f"a profile must be of several workers to predict {num_workers}, but it is of one; profile two"
                )
            terms["data"] = self._expose(backward, num_workers, bucket_bytes)
        return terms

    def exchange_s(self, num_bytes: float, num_workers: int) -> tuple[float, float]:
        """Return the time of an all-reduce, and that of each worker's processor, between those measured."""
        sizes = [one.num_bytes for one in self.exchanges]
        measured = 2 * (self.num_workers - 1) / self.num_workers
        share = 2 * (num_workers - 1) / num_workers / measured * self._slow_down(num_workers, threads=False)
        wall = _interpolate(sizes, [one.wall_s for one in self.exchanges], num_bytes)
        cpu = _interpolate(sizes, [one.cpu_s for one in self.exchanges], num_bytes)
        return wall * share, min(wall, cpu) * share

    def _expose(self, backward_s: float, num_workers: int, bucket_bytes: float) -> float:
        """Return the time by which exchanges lengthen a step: work of the processor, and what outlasts backward."""
        free_s = taken_s = 0.0
        for begin, end in _list_buckets(self.model.num_bytes, bucket_bytes):
            wall_s, cpu_s = self.exchange_s(end - begin, num_workers)
            ready_s = self._find_ready(end) * backward_s + taken_s
            free_s = max(free_s, ready_s) + wall_s
            taken_s += cpu_s
        return max(free_s, backward_s + taken_s) - backward_s

    def _find_ready(self, num_bytes: float) -> float:
        """Return the share of backward after which so many bytes of gradients are there."""
        done_s = done_bytes = 0.0
        blocks = list(reversed(self.model.blocks))
        whole_s = self.model.backward_s[-1]
        rest_s = max(0.0, whole_s - sum(block.backward_s for block in blocks))
        rest_bytes = max(0.0, self.model.num_bytes - sum(block.num_bytes for block in blocks))
        pieces = [
            (rest_s / 2, 0.0),
            *((block.backward_s, block.num_bytes) for block in blocks),
            (rest_s / 2, rest_bytes),
        ]
        for piece_s, piece_bytes in pieces:
            if piece_bytes and done_bytes + piece_bytes >= num_bytes:
                return min(1.0, (done_s + piece_s * (num_bytes - done_bytes) / piece_bytes) / max(whole_s, 1e-12))
            done_s, done_bytes = done_s + piece_s, done_bytes + piece_bytes
        return 1.0

    def _slow_down(self, num_workers: int, *, threads: bool = True) -> float:
        """Return how much longer computing takes with another number of workers on the same cores."""
        cores = self.machine.num_cores
        if not threads:
            return max(1.0, num_workers / cores) / max(1.0, self.num_workers / cores)
        mine = max(1, cores // num_workers)
        speed = mine / max(1.0, num_workers * mine / cores)
        measured = self.num_threads / max(1.0, self.num_workers * self.num_threads / cores)
        return measured / speed


def spread_of(profile: Profile, num_workers: int) -> float:
    """Return the standard deviation of the logarithm of a step that a profile predicts."""
    return SPREAD if num_workers == profile.num_workers else OTHER_SPREAD


def _list_buckets(num_bytes: float, bucket_bytes: float) -> Sequence[tuple[float, float]]:
    ends = [min(num_bytes, FIRST_BUCKET_BYTES, bucket_bytes)]
    while ends[-1] < num_bytes:
        ends.append(min(num_bytes, ends[-1] + bucket_bytes))
    return list(zip([0.0, *ends[:-1]], ends, strict=True))


def _line(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    (one, two), (early, late) = sizes, seconds
    each = max(0.0, (late - early) / (two - one)) if two > one else early / one
    return max(0.0, late + each * (size - two))


def _interpolate(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """Return seconds between measured sizes, straight in logarithms; beyond the largest in proportion."""
    if size >= sizes[-1]:
        return seconds[-1] * size / sizes[-1]
    logs = np.log(np.maximum(seconds, 1e-15))
    return float(np.exp(np.interp(log(max(size, 1.0)), np.log(sizes), logs)))
