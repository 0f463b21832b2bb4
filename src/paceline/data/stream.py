"""Iterable data sets: samples that can only be read one after another."""

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from paceline.errors import DataError, SettingsError


class Stream:
    """The samples of an iterable data set, epoch after epoch, joined.

    Every worker reads all of them and keeps those of its share, so that what is learnt from depends neither on the
    number of workers nor on their shares, provided that the data set yields the same samples everywhere and each time.
    Going on from a checkpoint reads again all that the epoch had before: a map-style data set costs neither.

    Args:
        dataset: Iterated once an epoch.
        num_epochs: Epochs after which it ends; None for no end.
    """

    def __init__(self, dataset: IterableDataset[Any], num_epochs: int | None) -> None:
        self._dataset, self._num_epochs = dataset, num_epochs
        self._epoch_starts = [0]
        """The position at which each epoch begins that was begun."""
        self._first_epoch = 0
        self._position = 0
        self._samples: Iterator[Any] | None = None

    def take(self, num_samples: int) -> list[Any]:
        """Return the next samples: fewer, or none, at the end.

        Raises:
            DataError: The data set yields nothing.
        """
        taken: list[Any] = []
        while len(taken) < num_samples and not self._is_over:
            if self._samples is None:
                self._samples = iter(self._dataset)
            new = list(itertools.islice(self._samples, num_samples - len(taken)))
            taken += new
            self._position += len(new)
            if len(taken) < num_samples:
                if self._position == self._epoch_starts[-1]:
                    raise DataError(f"a data set must have samples, but {type(self._dataset).__name__} yields none")
                self._samples = None
                self._epoch_starts.append(self._position)
        return taken

    def state(self, position: int) -> dict[str, int]:
        """Return the epoch that `position` is in, and where that began, as JSON."""
        index = max(index for index, start in enumerate(self._epoch_starts) if start <= position)
        return {"epoch": self._first_epoch + index, "epoch_start": self._epoch_starts[index]}

    def seek(self, state: dict[str, int], position: int) -> None:
        """Go on at `position`, of which `state` was returned.

        Raises:
            DataError: The epoch has fewer samples now.
        """
        self._first_epoch, self._epoch_starts = state["epoch"], [state["epoch_start"]]
        self._position, self._samples = position, iter(self._dataset)
        num_used = position - state["epoch_start"]
        num_skipped = sum(1 for _ in itertools.islice(self._samples, num_used))
        if num_skipped < num_used:
            raise DataError(
                "a data set must yield what it yielded when the checkpoint was saved, but "
                f"{type(self._dataset).__name__} has {num_skipped} samples, and {num_used} were used; resume with the "
                "same data"
            )

    @property
    def _is_over(self) -> bool:
        return self._num_epochs is not None and self._first_epoch + len(self._epoch_starts) > self._num_epochs


def refuse_for_stream(*, shuffle: bool, drop_last: bool, num_processes: int, dispatcher: object) -> None:
    """Refuse what needs samples under an index.

    Raises:
        SettingsError: It says what.
    """
    reason = ""
    if shuffle:
        reason = "shuffle; shuffle in the data set itself, the same on every worker"
    elif drop_last:
        reason = "drop_last; its epochs are joined anyway"
    elif num_processes:
        reason = f"num_processes {num_processes}; its samples come one after another, leave it out"
    elif dispatcher is not None:
        reason = "workers that go at their own pace, who take any samples; take a synchronous rule"
    if reason:
        raise SettingsError(f"an iterable data set must be read in its own order, but got {reason}")
