"""Torch data sets, as sources."""

import dataclasses
import operator
import traceback
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from paceline.data.base import Source, Spec
from paceline.data.batch import check_batch, describe, is_record
from paceline.data.orders import Indices
from paceline.data.randomness import capture_generators, seed_generators
from paceline.errors import DataError, SettingsError

CollateFn = Callable[[list[Any]], Any]
"""A function that makes a batch from a list of samples, as in torch's DataLoader."""


@dataclass(frozen=True)
class LoaderParts:
    """The settings of a torch DataLoader."""

    dataset: Dataset[Any]
    batch_size: int
    collate_fn: CollateFn | None
    drop_last: bool
    shuffle: bool | None
    num_processes: int
    seed: int | None
    """Seed of the DataLoader's own generator; None without one."""


def take_apart(loader: DataLoader[Any]) -> LoaderParts:
    """Return the settings of a DataLoader, except those that only make it faster, such as pinned memory.

    Raises:
        SettingsError: The DataLoader has a sampler or a `worker_init_fn` of its own, or batches otherwise than by a
            number of samples.
    """
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else loader.sampler
    obstacle, advice = _find_obstacle(loader, sampler)
    if obstacle:
        raise SettingsError(
            "a DataLoader must have a batch_size and torch's own order, which one global order replaces, but got "
            f"{obstacle}; give Loader the data set itself, {advice}"
        )
    assert type(batches) is BatchSampler
    shuffle = None if isinstance(sampler, _InfiniteConstantSampler) else isinstance(sampler, RandomSampler)
    collate_fn = None if loader.collate_fn is default_collate else loader.collate_fn
    generator = getattr(sampler, "generator", None) or loader.generator
    seed = generator.initial_seed() % 2**63 if generator is not None else None
    return LoaderParts(
        loader.dataset, batches.batch_size, collate_fn, batches.drop_last, shuffle, loader.num_workers, seed
    )


def _find_obstacle(loader: DataLoader[Any], sampler: Any) -> tuple[str, str]:
    """Return the obstacle to using a DataLoader, if there is one, and what to give beside its data set."""
    name = f"a {type(sampler).__name__}"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"a {type(loader).__name__}, which iterates in its own way", "with global_batch and collate_fn"
    if isinstance(sampler, DistributedSampler):
        return name, "with global_batch: Loader divides samples among the workers"
    if type(loader.batch_sampler) is not BatchSampler:
        batches = loader.batch_sampler
        return f"a {type(batches).__name__}" if batches is not None else "no batch_size", "with global_batch"
    if type(sampler) not in (SequentialSampler, RandomSampler, _InfiniteConstantSampler):
        return name, "of the samples that the sampler chooses: torch.utils.data.Subset(dataset, indices)"
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        return f"{name} with replacement", "with shuffle"
    if isinstance(sampler, Sized) and isinstance(loader.dataset, Sized) and len(sampler) != len(loader.dataset):
        return f"{name} of {len(sampler)} samples", "cut to those: torch.utils.data.Subset(dataset, range(n))"
    if loader.worker_init_fn is not None:
        return "a worker_init_fn", "which can do the same when it reads its first sample"
    return "", ""


def check_dataset(dataset: object, collate_fn: object) -> None:
    """Refuse a `collate_fn` that is no function, or a data set that cannot tell its length, as one of no tensors."""
    if collate_fn is not None and not callable(collate_fn):
        raise SettingsError(
            f"collate_fn must be a function that makes a batch from a list of samples, but got {collate_fn!r}; leave "
            "it out to stack them"
        )
    try:
        if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset):  # whose length is not used
            len(dataset)
    except LookupError as error:
        raise DataError(
            f"a data set must know its length, but that of {type(dataset).__name__} raises {error!r}; give it samples, "
            "such as TensorDataset(inputs, targets)"
        ) from error


def open_source(dataset: Any, collate_fn: CollateFn | None) -> Source:
    """Return a data set as a source.

    Raises:
        SettingsError: The data set makes batches itself, and there is a `collate_fn`.
        DataError: The data set has no samples under 0..len-1.
    """
    if not isinstance(dataset, Source):
        return MapSource(dataset, collate_fn)
    if collate_fn is not None:
        raise SettingsError(
            f"collate_fn must be left out where the data set makes batches itself, but got one with a "
            f"{type(dataset).__name__}; change what its `read` returns, or give MapSource(dataset, collate_fn)"
        )
    return dataset


class MapSource(Source):
    """Any torch data set with a length, as a `Source`; its samples may have any structure.

    Args:
        dataset: Data set with samples under 0..len-1.
        collate_fn: Function that makes a batch from a list of samples; by default torch's own, which stacks tensors.
        spec: Sizes for models that are built from settings.

    Raises:
        DataError: The data set has no length, or no samples under 0..len-1.
    """

    decodes_samples = True

    def __init__(self, dataset: Dataset[Any], collate_fn: CollateFn | None = None, spec: Spec | None = None) -> None:
        name = type(dataset).__name__
        if not isinstance(dataset, Sized) or not hasattr(type(dataset), "__getitem__"):
            raise DataError(
                f"a data set must have a length and samples under an index, or be an IterableDataset, but got {name}; "
                "define __len__ and __getitem__"
            )
        if isinstance(dataset, Mapping):
            keys = ", ".join(repr(key) for key in list(dataset)[:4])
            raise DataError(
                f"a data set must have its samples under 0..len-1, but got a {name} with the keys {keys}; give one of "
                "its parts, such as dataset['train'], or TensorDataset(*columns)"
            )
        self.spec = spec or Spec()
        self._dataset, self.collate_fn = dataset, collate_fn
        self.stacks = collate_fn is None
        self._num_samples = len(dataset)
        self._read_all = getattr(dataset, "__getitems__", None)  # torch's own way to read several at once
        self._draws = False
        """Whether reading several samples at once draws random numbers."""

    def __len__(self) -> int:
        """Return the data set's length."""
        return self._num_samples

    def with_collate(self, collate_fn: CollateFn) -> "MapSource":
        """Return the data set with another function that makes a batch from a list of samples."""
        return MapSource(self._dataset, collate_fn, self.spec)

    def read(self, indices: Indices) -> Any:
        """Return the samples, collated.

        Raises:
            DataError: A sample does not exist, or see `collate`.
        """
        return self.collate(self.decode(indices))

    def decode(self, fetched: Indices, seeds: Sequence[int] | None = None) -> list[Any]:
        """Return the samples; with seeds each has its own random numbers, whatever samples are read with it.

        Raises:
            DataError: A sample does not exist.
        """
        places = [int(index) for index in fetched]
        if seeds is None:
            return [self._read_one(place) for place in places] if self._read_all is None else self._read_several(places)
        seed_generators(seeds[0])
        if self._read_all is not None and not self._draws:
            before = capture_generators()
            samples = self._read_several(places)
            self._draws = capture_generators() != before
            if not self._draws:
                return samples
        samples = []
        for place, seed in zip(places, seeds, strict=True):
            seed_generators(seed)
            samples.append(self._read_one(place))
        return samples

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of the samples: see the function `collate`."""
        return collate(samples, self.collate_fn)

    def _read_several(self, places: list[int]) -> list[Any]:
        assert self._read_all is not None
        try:
            return list(self._read_all(places))
        except (LookupError, StopIteration):
            for place in places:  # one of them does not exist: name it
                self._read_one(place)
            raise

    def _read_one(self, place: int) -> Any:
        name = f"{type(self._dataset).__name__}[{place}]"
        try:
            return self._dataset[place]
        except (LookupError, StopIteration) as error:
            frames = traceback.extract_tb(error.__traceback__)[1:2]  # the data set's own line, if it is Python
            where = "".join(f" in {frame.filename}, line {frame.lineno}" for frame in frames)
            raise DataError(
                f"a data set must have a sample under each index below its length, {self._num_samples}, but {name} "
                f"raises {error!r}{where}; see its __len__ and __getitem__"
            ) from error
        except Exception as error:
            error.add_note(f"while {name} was read")
            raise


def collate(samples: list[Any], collate_fn: CollateFn | None) -> Any:
    """Return a batch made from samples.

    Raises:
        DataError: Torch cannot stack the samples and there is no `collate_fn`, or the result is no batch.
    """
    if collate_fn is None:
        _refuse_numbers(samples[0])
        try:
            batch = _stack(samples)
        except (RuntimeError, TypeError, KeyError, AttributeError) as error:
            _refuse_to_stack(samples, error)
    else:
        batch = collate_fn(samples)
        if isinstance(batch, list | tuple) and len(batch) == len(samples) and all(map(operator.is_, batch, samples)):
            raise DataError(
                "collate_fn must make one batch from a list of samples, but returned the samples unchanged; stack or "
                "pad them, or for a loss that takes a list of samples return {'samples': samples}"
            )
    check_batch(batch)
    return batch


def _stack(samples: list[Any]) -> Any:
    """Return samples stacked as torch does, and dataclasses too, which torch does not support."""
    first = samples[0]
    if isinstance(first, Mapping) and any(one.keys() != first.keys() for one in samples):
        raise KeyError("other keys")  # torch would drop some of them
    if not _holds_record(first):
        return default_collate(samples)
    if isinstance(first, Mapping):
        return {key: _stack([one[key] for one in samples]) for key in first}
    if isinstance(first, tuple | list):
        if any(len(one) != len(first) for one in samples):
            raise TypeError("other lengths")
        columns = [_stack(list(column)) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    names = [field.name for field in dataclasses.fields(first) if field.init]
    return dataclasses.replace(first, **{name: _stack([getattr(one, name) for one in samples]) for name in names})


def _holds_record(sample: Any) -> bool:
    """Return whether a sample is a dataclass, or has one inside."""
    if isinstance(sample, Mapping | tuple | list):
        return any(map(_holds_record, sample.values() if isinstance(sample, Mapping) else sample))
    return is_record(sample)


def _refuse_numbers(sample: Any, *, is_inside: bool = False) -> None:
    """Refuse a list of numbers inside a sample: torch makes a tensor of each place in it, instead of one of all."""
    if isinstance(sample, Mapping):
        parts = list(sample.values())
    elif is_record(sample):
        parts = [getattr(sample, field.name) for field in dataclasses.fields(sample)]
    elif isinstance(sample, list | tuple):
        parts = list(sample)
        if is_inside and not hasattr(sample, "_fields") and parts and isinstance(parts[0], int | float):
            raise DataError(
                "numbers that belong together must be a tensor or an array in a sample, but got a list of "
                f"{len(parts)}, of which torch would make {len(parts)} tensors; return torch.tensor(numbers), or give "
                "a collate_fn, which pads and stacks them (torch.utils.data.default_collate to keep torch's way)"
            )
    else:
        return
    for part in parts:
        _refuse_numbers(part, is_inside=True)


def _refuse_to_stack(samples: list[Any], error: Exception) -> NoReturn:
    shown = list(dict.fromkeys(describe(sample) for sample in samples))[:2]
    rule = "alike" if len(shown) > 1 else "made of tensors, arrays and numbers"
    raise DataError(
        f"samples must be {rule} for torch to stack them, but got {' and '.join(shown)}; change what the data set "
        "returns, or give a collate_fn, which makes a batch from a list of samples, for instance by padding "
        f"({type(error).__name__}: {str(error).splitlines()[0]})"
    ) from error
