"""The order that mixes a window of shards at a time.

Shapes: S shards with samples, W windows, B samples that are asked for.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from paceline.data.orders.base import Arrangement, Indices, SampleOrder
from paceline.data.permutation import Words, derive_seed, permute
from paceline.registry import register


@register("windows")
class Windows(SampleOrder):
    """Samples are mixed inside windows of a few shards, so that only these shards are read at a time.

    For an epoch, each window gets one shard of each of as many equal stretches of the data as it has shards, by a
    random permutation of every stretch: even of data that is sorted, a window has something of everything. The samples
    of a window are then permuted at random. One window of all shards mixes as well as `full`.

    It costs 32 bytes of memory a shard. Resuming costs the same anywhere: nothing is replayed.
    """

    window: int = Field(64, ge=1)
    """Number of shards whose samples are mixed with each other."""
    shard_samples: int | None = Field(None, ge=1)
    """Samples of the parts that longer shards are cut into; none to take shards as they are. For data in one large
    file: neighbours in it are then read together."""

    def arrange(self, shard_sizes: Sequence[int], seed: int) -> Arrangement:
        """Return the arrangement of shards of any sizes, of which some may be empty."""
        return _WindowsArrangement(self.cut(shard_sizes), self, seed)

    def cut(self, shard_sizes: Sequence[int]) -> Indices:
        """Return the sizes of the shards, or of the parts that they are cut into, as equal as possible."""
        sizes = np.asarray(shard_sizes, dtype=np.int64)
        if self.shard_samples is None or not len(sizes):
            return sizes
        num_parts = np.maximum(1, -(-sizes // self.shard_samples))
        numbers = np.arange(num_parts.sum()) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
        base, rest = np.repeat(sizes // num_parts, num_parts), np.repeat(sizes % num_parts, num_parts)
        parts: Indices = base + (numbers < rest)
        return parts


class _Epoch(NamedTuple):
    """The windows of one epoch: its shards, in the order in which windows have them."""

    offsets_S: Indices
    """Difference between a sample's index and its place in the epoch before samples are mixed, of each shard."""
    ends_S: Indices
    """Samples of the epoch up to the end of each shard."""
    ends_W: Indices
    """Samples of the epoch up to the end of each window."""


class _WindowsArrangement(Arrangement):
    def __init__(self, sizes: Indices, settings: Windows, seed: int) -> None:
        firsts = np.cumsum(sizes) - sizes
        self.num_samples, self._settings, self._seed = int(sizes.sum()), settings, seed
        self._firsts_S, self._sizes_S = firsts[sizes > 0], sizes[sizes > 0]
        self._num_windows = -(-len(self._sizes_S) // settings.window)
        self._epoch = lru_cache(maxsize=2)(self._lay_out)  # a batch may have the end of one and the start of another

    def samples_at(self, epoch: int, places: Words) -> Indices:
        laid = self._epoch(epoch)
        asked_B = places.astype(np.int64)
        windows_B = np.searchsorted(laid.ends_W, asked_B, side="right")
        mixed_B = np.empty_like(asked_B)
        for window in np.unique(windows_B):
            start, stop = (int(laid.ends_W[window - 1]) if window else 0), int(laid.ends_W[window])
            here_B = windows_B == window
            inside = (asked_B[here_B] - start).astype(np.uint64)
            key = derive_seed(self._seed, epoch, int(window), _SAMPLES)
            mixed_B[here_B] = permute(inside, stop - start, key).astype(np.int64) + start
        shards_B = np.searchsorted(laid.ends_S, mixed_B, side="right")
        return laid.offsets_S[shards_B] + mixed_B

    def describe(self) -> dict[str, Any]:
        digest = hashlib.blake2b(self._sizes_S.tobytes(), digest_size=8).hexdigest()
        return {"name": Windows.name, "window": self._settings.window, "shards": digest}

    def _lay_out(self, epoch: int) -> _Epoch:
        """Deal the shards of each stretch of the data out to the windows, at most one to each."""
        num_shards, num_windows = len(self._sizes_S), self._num_windows
        windows_S = np.zeros(num_shards, dtype=np.int64)
        for start in range(0, num_shards, num_windows) if num_windows > 1 else ():
            dealt = np.arange(min(num_windows, num_shards - start), dtype=np.uint64)
            key = derive_seed(self._seed, epoch, start, _SHARDS)
            windows_S[start : start + num_windows] = permute(dealt, num_windows, key)
        by_window_S = np.argsort(windows_S, kind="stable")
        ends_S = np.cumsum(self._sizes_S[by_window_S])
        ends_W = ends_S[np.cumsum(np.bincount(windows_S, minlength=num_windows)) - 1]
        sizes_S = self._sizes_S[by_window_S]
        return _Epoch(self._firsts_S[by_window_S] - ends_S + sizes_S, ends_S, ends_W)


_SAMPLES, _SHARDS = 1, 2
"""Numbers that keep the random numbers of samples and of shards apart."""
