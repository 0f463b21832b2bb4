"""Operations of a training, one after another, on what a worker reads.

Partners of mixed samples are those beside each other in the order of an epoch.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from paceline.data.augment.base import Augmentation, Samples
from paceline.data.augment.draws import Draws, Integers
from paceline.data.augment.function import CalledAugmentation
from paceline.data.augment.leaves import list_leaves
from paceline.data.base import Spec
from paceline.data.batch import select
from paceline.data.order import GlobalOrder, Interval, Positions
from paceline.data.orders import Indices
from paceline.registry import Settings, validate


class SampleOperation(Protocol):
    """An operation on samples: settings, or a callable of the user's."""

    @property
    def mixes(self) -> bool:
        """Whether it mixes each sample with a partner."""

    @property
    def keeps_values(self) -> bool:
        """Whether it only leaves out and moves values, so that it may come before samples are collated."""

    @property
    def draws_globally(self) -> bool:
        """Whether it may draw from the global random generators."""

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may apply it at once."""

    def apply(self, samples: Samples, draws: Draws) -> Samples:
        """Return the samples, changed."""


class Augmenter:
    """Operations, and the numbers that they draw: a function of seed, epoch, sample and place among the operations.

    Args:
        given: Operations: settings, their names, or callables of a sample.
        order: Global order of the samples.
        spec: Sizes of the data.

    Raises:
        SettingsError: A name or setting is unknown.
    """

    def __init__(self, given: Sequence[Any], order: GlobalOrder, spec: Spec) -> None:
        self.operations = [open_operation(each) for each in given]
        self._order, self._spec = order, spec
        self.mixes = any(operation.mixes for operation in self.operations)
        """Whether samples are mixed with those beside them."""

    @property
    def draws_globally(self) -> bool:
        """Whether an operation may draw from the global random generators."""
        return any(operation.draws_globally for operation in self.operations)

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may augment at once."""
        return all(operation.is_thread_safe for operation in self.operations)

    def widen(self, part: Positions) -> Positions:
        """Return the positions to read for those of `part`: with the partners of the first and the last."""
        if not self.mixes:
            return part
        assert isinstance(part, Interval), "samples that are mixed are not grouped by length"
        first, last = self._partner_of(part.start), self._partner_of(part.stop - 1)
        return Interval(min(part.start, first), max(part.stop, last + 1))

    def apply(
        self,
        decoded: Any,
        positions: Indices,
        own: slice,
        indices: Indices,
        collate: Callable[[list[Any]], Any] | None,
        *,
        stacks: bool = True,
    ) -> Any:
        """Return the batch of a part's samples, augmented.

        Args:
            decoded: Batch of the samples at `wide`; or a list of them, if there is a `collate`.
            positions: Positions that were read: see `widen`.
            own: Places of the batch's samples among them.
            indices: Indices of their samples.
            collate: Function that makes a batch from a list of samples; None where they are one.
            stacks: Whether `collate` stacks samples, so that a batch has their leaves.
        """
        partners = np.arange(len(positions))
        if self.mixes:
            partners = np.array([self._partner_of(position) for position in positions.tolist()]) - positions[0]
        epochs = self._order.epochs_at(positions)
        samples = Samples(decoded, partners, self._spec, is_batch=collate is None)
        for number, operation in enumerate(self.operations):
            if not (samples.is_batch or operation.keeps_values) and (
                operation.mixes or (stacks and _is_alike(samples.tree))
            ):
                assert collate is not None
                samples = Samples(collate(samples.tree), partners, self._spec)
            samples = operation.apply(samples, draw_for(self._order.seed, number, epochs, indices))
        if not samples.is_batch:
            assert collate is not None
            samples = Samples(collate(samples.tree), partners, self._spec)
        if own == slice(0, len(positions)):
            return samples.tree
        return select(samples.tree, own, len(positions))

    def _partner_of(self, position: int) -> int:
        epoch = self._order.epoch_of(position)
        start = self._order.start_of(epoch)
        partner = start + ((position - start) ^ 1)
        return partner if partner < self._order.start_of(epoch + 1) else position


def draw_for(seed: int, operation: int, epochs: Integers, samples: Indices) -> Draws:
    """Return the random numbers of an operation for samples of epochs."""
    return Draws.of_samples(seed, operation, epochs, samples)


def open_operation(given: Any) -> SampleOperation:
    """Return an operation: of settings, of their name, or of a callable of the user's."""
    is_settings = isinstance(given, Settings) or (isinstance(given, type) and issubclass(given, Settings))
    if callable(given) and not is_settings:
        return CalledAugmentation(given)
    return validate(Augmentation.model_validate, given, "augment")


def _is_alike(samples: list[Any]) -> bool:
    """Return whether samples can be stacked: tensors of equal shapes, numbers and texts alone."""
    shapes = {tuple(_shape_of(leaf) for _, leaf in list_leaves(sample)) for sample in samples}
    return len(shapes) == 1 and None not in next(iter(shapes))


def _shape_of(leaf: Any) -> tuple[int, ...] | None:
    if isinstance(leaf, Tensor | np.ndarray):
        return tuple(leaf.shape)
    return () if isinstance(leaf, int | float | str | bytes) else None
