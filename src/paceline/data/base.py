"""What every source of data is: samples under an index, read a batch at a time."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.data.order import Interval
from paceline.registry import Family

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Spec:
    """What a model must know of its data to be built."""

    num_classes: int
    """Classes of a classification, or the vocabulary of a language model."""
    input_shape: tuple[int, ...]
    """Shape of one sample's input, without the batch dim."""


@dataclass(frozen=True)
class Batch:
    """One worker's part of a global batch (or, while accumulating, of a part of it)."""

    inputs: Tensor
    targets: Tensor
    num_samples: int
    """Samples that count. It is 0 where the worker's share is empty: the tensors then hold one borrowed
    sample, so that forward and backward run as everywhere, and its weight makes it count for nothing."""
    interval: Interval
    """The whole global batch's positions in the global order, the same on every worker."""
    last: bool = True
    """Whether this is the last micro-batch of the step, after which gradients are exchanged."""

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`."""
        if device == self.inputs.device:
            return self
        inputs = self.inputs.to(device, non_blocking=True)
        targets = self.targets.to(device, non_blocking=True)
        return Batch(inputs, targets, self.num_samples, self.interval, self.last)


class Source(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples under indices 0..len-1. It is read by a background thread, and by forked loader processes.

    What is read must depend on the index alone: a draw from a global random generator would also change what the
    model's dropout draws, and could not be repeated on resume.
    """

    spec: Spec

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples at `indices`, stacked in that order."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one sample."""
        inputs, targets = self.read(np.array([index], dtype=np.int64))
        return inputs[0], targets[0]


@dataclass(frozen=True)
class Splits:
    """Data to train on, and data held out to judge by. They share no file (text) or sample (images)."""

    train: Source
    held_out: Source


class Data(Family):
    """Settings that say which data to train on and how to turn it into samples."""

    family = "data"

    @abstractmethod
    def open(self) -> Splits:
        """Open the data.

        Raises:
            DataError: It is missing, empty, damaged or of the wrong type.
        """
