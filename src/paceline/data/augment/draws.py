"""Random numbers that depend on the seed, the epoch, the sample and the operation alone.

Shapes: B samples.
"""

from typing import Any, Self

import numpy as np

from paceline.data.permutation import derive_seed, mix_words

Words = np.ndarray[tuple[Any, ...], np.dtype[np.uint64]]
Numbers = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Integers = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_SMALLEST = 2.0**-53
_GAMMA_ATTEMPTS = 64
"""Attempts at a gamma variate; each succeeds with a probability above 0.95."""


class Draws:
    """Random numbers of one operation for several samples: the streams of SplitMix64 (Steele 2014), one a sample.

    The n-th number of a sample is a hash of its key and n, so that it does not matter which samples are drawn for
    together, in which order, or in which process.

    Args:
        keys_B: Key of each sample's stream.
    """

    def __init__(self, keys_B: Words) -> None:
        self._keys_B, self._count = keys_B, 0

    @classmethod
    def of_samples(cls, seed: int, operation: int, epochs_B: Integers, samples_B: Integers) -> Self:
        """Return the random numbers of samples.

        Args:
            seed: Random seed of the training.
            operation: Number of the operation among those of the training.
            epochs_B: Epoch of each sample, from 0.
            samples_B: Index of each sample in the data set.
        """
        base = np.uint64(derive_seed(seed, operation))
        of_epochs = mix_words(epochs_B.astype(np.uint64) + base)
        return cls(mix_words((samples_B.astype(np.uint64) ^ of_epochs) + np.uint64(_GOLDEN)))

    def __len__(self) -> int:
        return len(self._keys_B)

    def words(self) -> Words:
        """Return the next 64 random bits of each sample."""
        self._count += 1
        return mix_words(self._keys_B + np.uint64(self._count * _GOLDEN & _WORD))

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Numbers:
        """Return a number from `low` to below `high` for each sample."""
        return low + (high - low) * ((self.words() >> np.uint64(11)).astype(np.float64) * _SMALLEST)

    def chance(self, probability: float) -> np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]:
        """Return for each sample whether something of the given probability happens."""
        return self.uniform() < probability

    def integers(self, stop_B: Integers) -> Integers:
        """Return a whole number from 0 to below `stop_B` for each sample."""
        return (self.uniform() * stop_B).astype(np.int64)

    def beta(self, concentration: float) -> Numbers:
        """Return a number of Beta(concentration, concentration) for each sample."""
        first, second = (self.branch()._log_gamma(concentration) for _ in range(2))
        return 1.0 / (1.0 + np.exp(np.clip(second - first, -700.0, 700.0)))

    def seeds(self) -> list[int]:
        """Return a seed for a random generator for each sample."""
        return [int(word) for word in self.words()]

    def grid(self, size: int) -> Numbers:
        """Return `size` numbers from 0 to below 1 for each sample, as an array (B, size)."""
        counts = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        words = mix_words(self.branch()._keys_B[:, None] + counts)
        return (words >> np.uint64(11)).astype(np.float64) * _SMALLEST

    def take(self, rows: Integers) -> "Draws":
        """Return the rest of some samples' random numbers."""
        taken = Draws(self._keys_B[rows])
        taken._count = self._count
        return taken

    def branch(self) -> "Draws":
        """Return streams of their own: what is drawn from them, however much, changes nothing in these."""
        return Draws(mix_words(self.words()))

    def _log_gamma(self, shape: float) -> Numbers:
        """Return the logarithms of gamma variates (Marsaglia and Tsang 2000), of any shape above 0."""
        d = shape + 1.0 - 1.0 / 3.0  # of shape + 1, which a power of a uniform variate takes down again
        boost = np.log(self.uniform() + _SMALLEST) / shape
        found = np.full(len(self), np.log(d))
        is_open = np.ones(len(self), dtype=bool)
        for _ in range(_GAMMA_ATTEMPTS):
            radius = np.sqrt(-2.0 * np.log(self.uniform() + _SMALLEST))
            normal = radius * np.cos(2.0 * np.pi * self.uniform())
            log_uniform = np.log(self.uniform() + _SMALLEST)
            v = (1.0 + normal / np.sqrt(9.0 * d)) ** 3
            log_v = np.log(np.maximum(v, _SMALLEST))
            accepted = is_open & (v > 0) & (log_uniform < 0.5 * normal**2 + d - d * v + d * log_v)
            found[accepted] = np.log(d) + log_v[accepted]
            is_open &= ~accepted
            if not is_open.any():
                break
        return found + boost
