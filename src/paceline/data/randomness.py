"""Random numbers that data sets draw from the global generators of torch, NumPy and Python."""

import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from paceline.errors import SettingsError

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


def watch_draws(items: Iterator[Item], name: str, advice: str, *, refuses: bool = False) -> Iterator[Item]:
    """Yield all `items`, and warn, or refuse, if reading the first draws from a global generator.

    Only for the first item is it certain that the training, which waits for it, draws nothing meanwhile.

    Args:
        items: Items to read.
        name: Name of their source.
        advice: Advice at the end of the warning.
        refuses: Whether draws are refused, since the run must be repeatable.

    Raises:
        SettingsError: The first item draws, which is refused.
    """
    before = capture_generators()
    first = list(itertools.islice(items, 1))
    if capture_generators() != before:
        found = f"{name}, or the collate_fn, draws random numbers from a global generator, in a background thread"
        if refuses:
            raise SettingsError(
                "data must draw no random numbers beside the model with num_virtual_workers, or weights differ from "
                f"run to run, but {found}; {advice}"
            )
        warnings.warn(
            f"{found} beside the model, which draws from it too: no run can be repeated, or resumed exactly; {advice}",
            SharedRandomNumbersWarning,
            stacklevel=2,
        )
    return itertools.chain(first, items)
