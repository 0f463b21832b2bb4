"""Random numbers that data sets draw from the global generators of torch, NumPy and Python."""

import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch

Item = TypeVar("Item")


class SharedRandomNumbersWarning(UserWarning):
    """Data and model draw from the same random generators at the same time, so that no run can be repeated."""


def seed_generators(seed: int) -> None:
    """Set the global generators of this process to a seed; of torch, the CPU's generator."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def capture_generators() -> tuple[Any, ...]:
    """Return the states of the global generators, which change with every number drawn."""
    of_numpy = np.random.get_state(legacy=False)["state"]
    of_torch = torch.default_generator.get_state().numpy().tobytes()
    return of_torch, of_numpy["pos"], np.asarray(of_numpy["key"]).tobytes(), random.getstate()


def warn_of_draws(items: Iterator[Item], name: str, advice: str) -> Iterator[Item]:
    """Yield all `items`, and warn if reading the first draws from a global generator.

    Only for the first item is it certain that the training, which waits for it, draws nothing meanwhile.

    Args:
        items: Items to read.
        name: Name of their source.
        advice: Advice at the end of the warning.
    """
    before = capture_generators()
    first = list(itertools.islice(items, 1))
    if capture_generators() != before:
        warnings.warn(
            f"{name}, or the collate_fn, draws random numbers from a global generator, in a background thread beside "
            f"the model, which draws from it too: no run can be repeated, or resumed exactly; {advice}",
            SharedRandomNumbersWarning,
            stacklevel=2,
        )
    return itertools.chain(first, items)
