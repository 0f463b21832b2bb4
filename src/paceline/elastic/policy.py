"""Policies of scaling: functions that say how many workers a run should have, from what they bring and cost."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from paceline.checkpoint.durable import open_regular
from paceline.errors import SettingsError

LEAST_GAIN = 0.5


@dataclass(frozen=True)
class ScaleFacts:
    """What a policy of scaling is told."""

    size: int
    """Number of workers that train now."""
    most_workers: int
    """Largest number that the run can have."""
    samples_per_s: float
    """Throughput of all workers together, since their number changed last."""
    samples_per_s_by_size: dict[int, float] = field(default_factory=dict)
    """Latest throughput with each number of workers that this launcher has measured."""
    prices: dict[str, float] = field(default_factory=dict)
    """Content of the file of prices, read anew for each call; empty without one."""

    @property
    def samples_per_s_per_worker(self) -> float:
        """Throughput per worker."""
        return self.samples_per_s / self.size


ScalePolicy: TypeAlias = Callable[[ScaleFacts], int]


def efficient(facts: ScaleFacts) -> int:
    """Return as many workers as pay: each brings at least half of what the others bring on average.

    One worker more is tried; if it brings less, it leaves again, and that number is not tried again. With prices
    ``price_per_hour`` (of a worker) and ``budget_per_hour``, there are never more than the budget pays for.
    """
    most = facts.most_workers
    if "price_per_hour" in facts.prices and "budget_per_hour" in facts.prices:
        price, budget = facts.prices["price_per_hour"], facts.prices["budget_per_hour"]
        most = min(most, int(budget // price)) if price > 0 else most
    size, measured = facts.size, facts.samples_per_s_by_size | {facts.size: facts.samples_per_s}
    if size > 1 and size - 1 in measured and not _pays(measured, size):
        size -= 1
    elif size + 1 not in measured or _pays(measured, size + 1):
        size += 1
    return max(1, min(size, most))


def _pays(measured: dict[int, float], size: int) -> bool:
    """Return whether the last of `size` workers brings enough."""
    return measured[size] - measured[size - 1] >= LEAST_GAIN * measured[size - 1] / (size - 1)


POLICIES: dict[str, ScalePolicy] = {"efficient": efficient}


def read_prices(path: Path) -> dict[str, float]:
    """Return the numbers of a JSON file.

    Raises:
        SettingsError: The file holds something else.
    """
    try:
        with open_regular(path) as file:
            prices = json.loads(file.readall())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} must hold prices as JSON, but could not be read: {error}; mend it") from error
    if not isinstance(prices, dict) or not all(_is_number(price) for price in prices.values()):
        raise SettingsError(f"{path} must hold one JSON object of numbers, but holds {prices!r:.200}; mend it")
    return {name: float(price) for name, price in prices.items()}


def check_answer(answer: object, most_workers: int) -> int:
    """Return what a policy has answered, if that is a number of workers that the run can have.

    Raises:
        SettingsError: The answer is something else.
    """
    if isinstance(answer, int) and not isinstance(answer, bool) and 1 <= answer <= most_workers:
        return answer
    raise SettingsError(
        f"a policy of scaling must return a whole number from 1 to {most_workers}, but returned {answer!r}; "
        "mend the function"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
