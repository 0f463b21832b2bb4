"""What a comparison is: the same training in several ways, each with several seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.benchmarks.tables import TableRow
from paceline.errors import unknown_name

Overrides = list[tuple[str, str]]


@dataclass(frozen=True)
class Outcome:
    """How one run ended."""

    loss: float
    """Held out."""
    accuracy: float | None
    wire_bytes: int
    """What one worker sent in all steps."""
    elapsed_s: float


Outcomes = Sequence[Outcome]
"""Of one way, by seed."""


@dataclass(frozen=True)
class Comparison:
    """Several ways to do the same training.

    Args:
        ways: Each by its name, as overrides of a run; the first is the reference.
        describe: Returns the row of a way from its name, its outcomes and those of the reference.
    """

    ways: Mapping[str, Overrides]
    describe: Callable[[str, Outcomes, Outcomes], TableRow]

    def choose(self, names: Sequence[str] | None) -> list[str]:
        """Return the ways that are run: the reference, then those named, by default all.

        Raises:
            UnknownNameError: There is no such way.
        """
        for name in names or ():
            if name not in self.ways:
                raise unknown_name("each of --only", name, self.ways)
        return list(dict.fromkeys([next(iter(self.ways)), *(self.ways if names is None else names)]))

    def compare(self, outcomes: Mapping[str, Outcomes]) -> list[TableRow]:
        """Return a row for each way; the reference must be among them."""
        reference = outcomes[next(iter(self.ways))]
        return [self.describe(name, ours, reference) for name, ours in outcomes.items()]
