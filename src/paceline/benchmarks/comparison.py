"""What a comparison is: the same training in several ways, each with several seeds."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.benchmarks.tables import TableRow
from paceline.errors import unknown_name

Overrides = list[tuple[str, str]]

_NUM_RESAMPLES = 10_000


@dataclass(frozen=True)
class RunOutcome:
    """How one run ended."""

    loss: float
    """Held out."""
    accuracy: float | None
    wire_bytes: int
    """Bytes that one worker sent in all steps."""
    elapsed_s: float


Outcomes = Sequence[RunOutcome]
"""Outcomes of one way, by seed."""


@dataclass(frozen=True)
class RunComparison:
    """Several ways to do the same training.

    Args:
        make_ways: Returns the ways to do a training of so many steps, each by its name, as overrides of a run; the
            first is the reference.
        describe: Returns the row of a way from its name, its overrides, its outcomes and those of the reference.
    """

    make_ways: Callable[[int], Mapping[str, Overrides]]
    describe: Callable[[str, Overrides, Outcomes, Outcomes], TableRow]

    def choose(self, names: Sequence[str] | None, num_steps: int) -> dict[str, Overrides]:
        """Return the ways that are run: the reference, then those named, by default all.

        Raises:
            UnknownNameError: There is no such way.
        """
        ways = self.make_ways(num_steps)
        for name in names or ():
            if name not in ways:
                raise unknown_name("each of --only", name, ways)
        chosen = [next(iter(ways)), *(ways if names is None else names)]
        return {name: ways[name] for name in chosen}

    def compare(self, ways: Mapping[str, Overrides], outcomes: Mapping[str, Outcomes]) -> list[TableRow]:
        """Return a row for each way; the reference must be the first."""
        reference = outcomes[next(iter(ways))]
        return [self.describe(name, overrides, outcomes[name], reference) for name, overrides in ways.items()]


@dataclass(frozen=True)
class MeanRatio:
    """The mean of some losses to the mean of others of the same seeds."""

    ratio: float
    lower: float | None
    """Lower bound of its bootstrap 95% interval (one-sided), in which seeds are drawn for both; None with one seed."""
    upper: float | None
    """Upper bound likewise."""


def compare_means(ours: Sequence[float], reference: Sequence[float]) -> MeanRatio:
    """Return how the mean of `ours` stands to that of `reference`; both by seed."""
    pairs = list(zip(ours, reference, strict=True))
    if len(pairs) == 1:
        return MeanRatio(_ratio_of_means(pairs), None, None)
    generator = random.Random(0)
    ratios = sorted(_ratio_of_means(generator.choices(pairs, k=len(pairs))) for _ in range(_NUM_RESAMPLES))
    return MeanRatio(
        _ratio_of_means(pairs), ratios[round(0.05 * _NUM_RESAMPLES)], ratios[round(0.95 * _NUM_RESAMPLES) - 1]
    )


def _ratio_of_means(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(ours for ours, _ in pairs) / sum(reference for _, reference in pairs)
