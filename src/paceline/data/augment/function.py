"""Functions of the user's as augmentation."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, ClassVar

import torch

from paceline.data.augment.base import Augmentation, Samples
from paceline.data.augment.draws import Draws
from paceline.data.augment.leaves import get_leaf, set_leaf
from paceline.data.batch import map_tensors
from paceline.data.map_source import collate
from paceline.data.randomness import seed_generators
from paceline.functions import Function, find_function
from paceline.registry import register

GENERATOR = "generator"
"""Name of the parameter by which a function gets a random generator of its own."""


@register("function")
class FunctionAugmentation(Function, Augmentation):
    """A function of one sample, or of leaves of it, that returns what takes its place.

    If it has a parameter ``generator``, that is a `torch.Generator` with the sample's seed. If not, the global
    generators of torch, NumPy and Python have the sample's seed while it runs, in a process that only reads: a worker
    then reads with one process at least.
    """

    given: ClassVar[tuple[str, ...]] = ("a sample, or a leaf of one",)
    offered: ClassVar[tuple[str, ...]] = (GENERATOR,)

    leaves: tuple[str, ...] = ()
    """Paths of the leaves of a sample that the function is called with, one after another; by default it is called
    with the whole sample."""

    @property
    def draws_globally(self) -> bool:
        """Whether it may draw from the global random generators: it gets none of its own."""
        return not takes_generator(find_function(self.path))

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may apply it at once, which is not known of a function."""
        return False

    def apply(self, samples: Samples, draws: Draws) -> Samples:
        """Return the samples that the function returns."""
        return call_with_samples(self.call, samples, draws, self.leaves, takes_generator=not self.draws_globally)


class CalledAugmentation:
    """A callable that was given to a `Loader`, as augmentation: see `FunctionAugmentation`.

    Args:
        function: Callable that takes a sample.
    """

    mixes = keeps_values = is_thread_safe = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.draws_globally = function, not takes_generator(function)

    def apply(self, samples: Samples, draws: Draws) -> Samples:
        """Return the samples that the function returns."""
        return call_with_samples(self._function, samples, draws, (), takes_generator=not self.draws_globally)


def takes_generator(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter for a random generator."""
    with contextlib.suppress(TypeError, ValueError):  # no signature
        return GENERATOR in inspect.signature(function).parameters
    return False


def call_with_samples(
    function: Callable[..., Any], samples: Samples, draws: Draws, leaves: tuple[str, ...], *, takes_generator: bool
) -> Samples:
    """Return the samples with what a function makes of each, or of its leaves."""
    changed = []
    for sample, seed in zip(_list_samples(samples), draws.seeds(), strict=True):
        if takes_generator:
            offered = {GENERATOR: torch.Generator().manual_seed(seed >> 1)}
        else:
            offered = {}
            seed_generators(seed)
        for path in leaves or ("",):
            value = function(get_leaf(sample, path) if path else sample, **offered)
            sample = set_leaf(sample, path, value)
        changed.append(sample)
    tree = collate(changed, None) if samples.is_batch else changed
    return Samples(tree, samples.partners_B, samples.spec, samples.is_batch)


def _list_samples(samples: Samples) -> Iterator[Any]:
    for row in range(len(samples)):
        yield map_tensors(itemgetter(row), samples.tree) if samples.is_batch else samples.tree[row]
