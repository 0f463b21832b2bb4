"""How well an order mixes data: whether the labels of a batch are as mixed as chance would have them."""

import warnings
from typing import NamedTuple

import numpy as np
from torch import Tensor

from paceline.data.base import Source
from paceline.data.batch import Batch
from paceline.data.order import GlobalOrder, Interval
from paceline.data.orders import Arrangement, Indices, SampleOrder, Windows
from paceline.errors import DataError

CLUMPED = 0.02
"""Clumping from which a model is worse than with the order ``full``: see docs/data-order.md."""
_MOST_BLOCKS, _LARGEST_BLOCK, _NUM_PROBES = 128, 256, 256
_NUM_PLACES = 16


class ClumpedOrderWarning(UserWarning):
    """Batches have fewer kinds of samples than chance would give them, since windows are small for sorted data."""


class Labels(NamedTuple):
    """Labels of samples at even distances in the data, each of which stands for its neighbours."""

    values: Indices
    num_samples: int

    def at(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return the numbers of the known samples that are next to some, each once, and their labels."""
        known = np.unique(samples * len(self.values) // self.num_samples)
        return known, self.values[known]


def read_labels(source: Source, num_probes: int = _NUM_PROBES) -> Labels | None:
    """Return the labels of some samples; None if samples have none: whole numbers, one for each.

    Args:
        source: Source of the samples.
        num_probes: Largest number of samples to read.
    """
    num_probes = min(num_probes, len(source))
    probes = np.arange(num_probes, dtype=np.int64) * len(source) // num_probes
    try:
        targets = Batch(source.read(probes), num_probes, Interval(0, num_probes)).targets
    except DataError:
        return None
    if not isinstance(targets, Tensor) or targets.shape != (num_probes,) or targets.is_floating_point():
        return None
    return Labels(targets.numpy().astype(np.int64), len(source))


def label_places(source: Source) -> Labels:
    """Return labels that say in which sixteenth of the data a sample is, as if the data were sorted by class."""
    num_known = min(len(source), 2**16)
    return Labels(np.arange(num_known) * _NUM_PLACES // num_known, len(source))


def measure_clumping(arrangement: Arrangement, seed: int, labels: Labels, batch: int) -> float:
    """Return the share of the variance of labels that lies between batches: about 0 if mixed by chance, 1 if sorted.

    It is the intraclass correlation of labels (as indicators of classes) in the batches of one epoch, from which what
    chance alone adds is subtracted, so that it can be slightly below 0.

    Args:
        arrangement: Arrangement of the samples.
        seed: Random seed of the order.
        labels: Labels of the samples.
        batch: Global batch.
    """
    order = GlobalOrder(arrangement.num_samples, seed, arrangement=arrangement)
    size = max(2, min(batch, _LARGEST_BLOCK, order.num_samples // 4))
    num_blocks = max(1, min(_MOST_BLOCKS, order.num_samples // size))
    starts = [number * (order.num_samples - size) // max(1, num_blocks - 1) for number in range(num_blocks)]
    found = [labels.at(order.samples_at(Interval(start, start + size)))[1] for start in starts]
    classes = np.unique(np.concatenate(found))
    counts = np.array([(block[:, None] == classes).sum(0) for block in found])  # blocks by classes
    sizes = counts.sum(1)
    if num_blocks < 2 or len(classes) < 2 or sizes.sum() <= num_blocks:
        return 0.0
    parts, whole = counts / sizes[:, None], counts.sum(0) / sizes.sum()
    between = (sizes[:, None] * (parts - whole) ** 2).sum() / (num_blocks - 1)
    within = (sizes * (1 - (parts**2).sum(1))).sum() / (sizes.sum() - num_blocks)
    average = (sizes.sum() - (sizes**2).sum() / sizes.sum()) / (num_blocks - 1)
    return float((between - within) / (between + (average - 1) * within))


def find_window(source: Source, order: Windows, seed: int, labels: Labels, batch: int) -> int | None:
    """Return the smallest power of 2 as a window that mixes well; None if only one window of all shards does."""
    window = 1
    while not _is_whole(source, order.model_copy(update={"window": window})):
        arrangement = source.arrange(order.model_copy(update={"window": window}), seed)
        if measure_clumping(arrangement, seed, labels, batch) < CLUMPED:
            return window
        window *= 2
    return None


def warn_of_clumps(source: Source, order: SampleOrder, seed: int, batch: int) -> None:
    """Warn of an order by windows if the samples in a window are too alike, and say which window would do."""
    if not isinstance(order, Windows) or _is_whole(source, order):
        return
    labels = read_labels(source)
    if labels is None:
        return
    clumping = measure_clumping(source.arrange(order, seed), seed, labels, batch)
    if clumping < CLUMPED:
        return
    window = find_window(source, order, seed, labels, batch)
    advice = f"take a window of {window}" if window is not None else "take the order full"
    warnings.warn(
        f"samples should be mixed as by chance, but the data is sorted and windows of {order.window} shards leave "
        f"{clumping:.0%} of the difference of labels between batches, which makes a worse model; {advice} "
        "(`paceline data order` compares them)",
        ClumpedOrderWarning,
        stacklevel=2,
    )


def _is_whole(source: Source, order: Windows) -> bool:
    """Return whether one window has all samples."""
    return len([size for size in order.cut(source.shard_sizes) if size]) <= order.window
