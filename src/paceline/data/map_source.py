"""Data sets of torch's, as sources."""

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, default_collate
from torch.utils.data.dataloader import _InfiniteConstantSampler

from paceline.data.base import Source, Spec
from paceline.data.batch import check_batch, describe
from paceline.data.order import Indices
from paceline.errors import DataError, SettingsError

CollateFn = Callable[[list[Any]], Any]
"""What makes a batch of a list of samples, as that of torch's DataLoader."""


@dataclass(frozen=True)
class LoaderParts:
    """What a DataLoader of torch's is made of."""

    dataset: Dataset[Any]
    batch_size: int
    collate_fn: CollateFn | None
    drop_last: bool
    shuffle: bool | None
    num_processes: int


def take_apart(loader: DataLoader[Any]) -> LoaderParts:
    """Return what a DataLoader is made of.

    Raises:
        SettingsError: It has a sampler of its own, or batches otherwise than by a number of samples.
    """
    sampler = getattr(loader.batch_sampler, "sampler", None)
    known = (RandomSampler, SequentialSampler, _InfiniteConstantSampler)
    is_known = type(loader.batch_sampler) is BatchSampler and type(sampler) in known
    if isinstance(sampler, RandomSampler) and isinstance(loader.dataset, Sized):
        is_known &= not sampler.replacement and sampler.num_samples == len(loader.dataset)
    if loader.batch_size is None or not is_known:
        named = type(sampler or loader.batch_sampler or loader.sampler).__name__
        raise SettingsError(
            "a DataLoader must have a batch_size and torch's own order, in whose place comes one global order, but got "
            f"a {named}; give Loader the data set itself, filtered or repeated as the sampler would, with "
            "global_batch, collate_fn and shuffle"
        )
    shuffle = None if isinstance(sampler, _InfiniteConstantSampler) else isinstance(sampler, RandomSampler)
    collate_fn = None if loader.collate_fn is default_collate else loader.collate_fn
    return LoaderParts(loader.dataset, loader.batch_size, collate_fn, loader.drop_last, shuffle, loader.num_workers)


class MapSource(Source):
    """Any torch data set with a length, as a `Source`; its samples may have any structure.

    Args:
        dataset: Samples under 0..len-1.
        collate_fn: Makes a batch of a list of samples; by default torch's own, which stacks tensors of one shape.
        spec: What a model that is built from settings must know of the data.

    Raises:
        DataError: The data set has no length.
    """

    def __init__(self, dataset: Dataset[Any], collate_fn: CollateFn | None = None, spec: Spec | None = None) -> None:
        if not isinstance(dataset, Sized):
            raise DataError(
                f"a data set must have a length, or be an IterableDataset, but got {type(dataset).__name__}; define "
                "__len__ and __getitem__"
            )
        self.spec = spec or Spec()
        self._dataset, self._collate_fn = dataset, collate_fn
        self._num_samples = len(dataset)

    def __len__(self) -> int:
        """Return the data set's length."""
        return self._num_samples

    def read(self, indices: Indices) -> Any:
        """Return the samples, collated."""
        return collate([self._dataset[int(index)] for index in indices], self._collate_fn)


def collate(samples: list[Any], collate_fn: CollateFn | None) -> Any:
    """Return a batch of samples.

    Raises:
        DataError: Torch cannot stack them and there is no `collate_fn`, or what is made of them is no batch.
    """
    if collate_fn is not None:
        batch = collate_fn(samples)
    else:
        try:
            batch = default_collate(samples)
        except (RuntimeError, TypeError, KeyError, AttributeError) as error:
            shown = " and ".join(dict.fromkeys(describe(sample) for sample in samples[:8]))
            raise DataError(
                f"samples must be alike for torch to stack them, but got {shown}; give a collate_fn, which makes a "
                f"batch of a list of samples, for instance by padding ({type(error).__name__}: "
                f"{str(error).splitlines()[0]})"
            ) from error
    check_batch(batch)
    return batch
