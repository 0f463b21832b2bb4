"""Data sets of torch's, as sources."""

from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, default_collate

from paceline.data.base import Indices, Source, Spec


class MapSource(Source):
    """Any torch data set of (input, target) pairs, as a `Source`.

    Args:
        dataset: With a length, and samples that torch's default collation can stack.
        spec: What a model must know of it; only a `Run` needs it.
    """

    def __init__(self, dataset: Dataset[Any], spec: Spec | None = None) -> None:
        if spec is not None:
            self.spec = spec
        self._dataset = dataset
        self._num_samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset leaves __len__ out

    def __len__(self) -> int:
        """Return the data set's length."""
        return self._num_samples

    def read(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return the samples, collated as torch does it."""
        inputs, targets = default_collate([self._dataset[int(index)] for index in indices])
        return inputs, targets
