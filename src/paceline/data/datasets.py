"""Torch data sets that a user's function returns."""

import random
import threading
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data.base import Data, IterableSource, Source, Splits
from paceline.data.batch import describe
from paceline.data.map_source import CollateFn, MapSource, collate, take_apart
from paceline.errors import DataError, SettingsError
from paceline.functions import Function
from paceline.registry import register

T = TypeVar("T")

SEEDING = threading.Lock()
"""Lock of the seeding of torch's global generator, which workers that are threads share."""


class Collate(Function):
    """A function (samples) -> batch, as torch's DataLoader takes it, that makes a batch from a list of samples."""

    given: ClassVar[tuple[str, ...]] = ("a list of samples",)


@register("function")
class FunctionData(Function, Data):
    """Torch data sets that a function returns.

    The function returns ``(train, held_out)``, ``{"train": ..., "held_out": ...}``, a `Splits`, or one data set: then
    there is no held-out data and no evaluation. ``torch.utils.data.random_split(dataset, [0.9, 0.1])`` makes two from
    one. Each is map-style, with samples of any structure; iterable, which every worker reads whole; or a DataLoader, of
    which the data set, `collate_fn`, `drop_last`, shuffling and number of processes are used, with the run's own
    `global_batch`.

    Every process calls it and must get the same data. The global generators of torch, NumPy and Python have a fixed
    seed while it runs, whatever the run's seed is, so that a random split is the same everywhere.
    """

    def open(self) -> Splits:
        """Call the function."""
        return self.open_with(None)

    def open_with(self, collate_fn: CollateFn | None) -> Splits:
        """Call the function.

        Args:
            collate_fn: Function that makes a batch from a list of samples; by default a DataLoader's, or torch's own.

        Raises:
            DataError: The function returns something else than data sets.
        """
        with _seeded():
            made = self.call()
        if isinstance(made, Splits):
            return _check_batched(made, collate_fn)
        train, held_out = self._part(made)
        options: dict[str, Any] = {}
        if isinstance(train, DataLoader):
            parts = take_apart(train)
            names = ("drop_last", "shuffle", "num_processes", "batch_size")
            options = {name: getattr(parts, name) for name in names}
        return Splits(
            _open(train, collate_fn), _open(held_out, collate_fn) if held_out is not None else None, **options
        )

    def _part(self, made: Any) -> tuple[Any, Any]:
        """Return the training data, and the held-out data or None."""
        if isinstance(made, Mapping) and "train" in made and set(made) <= {"train", "held_out"}:
            parts = (made["train"], made.get("held_out"))
        elif isinstance(made, tuple | list) and len(made) == 2 and all(map(_is_dataset, made)):
            parts = (made[0], made[1])
        else:
            parts = (made, None)
        if not _is_dataset(parts[0]) or not (parts[1] is None or _is_dataset(parts[1])):
            raise DataError(
                f"{self.path} must return (train, held_out), {{'train': ..., 'held_out': ...}} or one data set, each "
                f"of them a torch Dataset or DataLoader, but got {describe(made)}"
            )
        return parts


def _is_dataset(found: object) -> bool:
    if isinstance(found, Dataset | DataLoader | list):
        return True
    has_items = isinstance(found, Sized) and callable(getattr(type(found), "__getitem__", None))
    return has_items and not isinstance(found, tuple | str | bytes | Mapping | Tensor | np.ndarray)


def _open(dataset: Any, collate_fn: CollateFn | None) -> Source | IterableSource:
    if isinstance(dataset, DataLoader):
        parts = take_apart(dataset)
        dataset, collate_fn = parts.dataset, collate_fn or parts.collate_fn
    if isinstance(dataset, Source):
        return _check_batched(dataset, collate_fn)
    if isinstance(dataset, IterableDataset):
        return IterableSource(dataset, partial(collate, collate_fn=collate_fn))
    return MapSource(dataset, collate_fn)


def _check_batched(found: T, collate_fn: CollateFn | None) -> T:
    if collate_fn is not None:
        raise SettingsError(
            f"collate_fn must come with torch data sets, but got Paceline's {type(found).__name__}, which "
            "makes its own batches; leave it out"
        )
    return found


@contextmanager
def _seeded() -> Iterator[None]:
    """Give the global generators a fixed seed inside, and restore their state afterwards."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
