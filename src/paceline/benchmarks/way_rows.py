"""The rows of `paceline compare`: each way to train beside the reference, sorted by time to equal loss, and advice.

*Equal loss* is the held-out loss with which the reference ends, plus a small margin: without one, seeds would decide.
A way's *steps to equal loss* are those after which its curve of held-out losses, a mean over seeds, is first that low;
between two evaluations it counts as straight. Nothing is extrapolated: a way whose curve never is that low has not
reached it, however near it ended. *Time to equal loss* is the time of these steps.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.benchmarks.comparison import Curve, Outcomes, compare_means
from paceline.benchmarks.tables import TableRow
from paceline.monitor.formatting import duration, size

LIMIT = 1.05
"""Largest ratio of held-out losses that a way should end with by default."""
_LEAST_GAIN = 1.05
"""Least gain in time for which another way is worth its settings."""

Price = Callable[[float], float]
"""Seconds of the first steps of a training, by their number."""


@dataclass(frozen=True)
class WayRow(TableRow):
    """One way to train beside the reference, at the same number of samples."""

    headings = (
        "way", "time to equal loss", "steps", "time of a step", "sent in a step", "held-out loss", "to the reference's",
        "accuracy", "note",
    )  # fmt: skip

    way: str
    is_reference: bool
    num_seeds: int
    loss: float | None = None
    """Mean over seeds; None if it failed."""
    losses: tuple[float, ...] = ()
    """Losses by seed."""
    loss_ratio: float | None = None
    """Mean of the losses to the mean of the reference's."""
    loss_ratio_lower: float | None = None
    """Lower bound of its bootstrap 95% interval (one-sided); None with one seed."""
    loss_ratio_upper: float | None = None
    """Upper bound likewise."""
    accuracy: float | None = None
    """Mean over seeds; None if the loss has none."""
    bytes_per_step: float | None = None
    """Bytes that rank 0 sent, mean over steps and seeds."""
    step_s: float | None = None
    """Mean time of a step."""
    steps_to_loss: float | None = None
    """Steps to equal loss; None if it was not reached."""
    time_to_loss_s: float | None = None
    """Time to equal loss; None if it was not reached."""
    failure: str = ""
    """Reason for which it could not be trained; empty if it was."""

    @property
    def is_within_limit(self) -> bool:
        """Whether it ends with at most `LIMIT` times the reference's loss."""
        return self.loss_ratio is not None and self.loss_ratio <= LIMIT

    def cells(self) -> tuple[str, ...]:
        """Return it as texts."""
        if self.failure:
            return (self.way, "failed", *[""] * 6, self.failure)
        note = "" if self.is_within_limit else f"loss above {LIMIT:g}"
        return (
            self.way,
            "not reached" if self.time_to_loss_s is None else duration(self.time_to_loss_s),
            "" if self.steps_to_loss is None else f"{self.steps_to_loss:.0f}",
            _or_empty(self.step_s, duration),
            _or_empty(self.bytes_per_step, size),
            _or_empty(self.loss, "{:.4f}".format),
            _or_empty(self.loss_ratio, "{:.3f}".format),
            _or_empty(self.accuracy, "{:.2%}".format),
            "the reference" if self.is_reference else note,
        )


def describe_way(way: str, ours: Outcomes, reference: Outcomes, price: Price | None, within: float) -> WayRow:
    """Return the row of a way that was trained.

    Args:
        way: Name of the way.
        ours: Outcomes of its runs.
        reference: Outcomes of the reference's runs, with the same seeds.
        price: Time on another network; None for the time that its runs took.
        within: Margin over the reference's last loss, as a share of it, for a loss to count as equal.
    """
    losses = tuple(outcome.loss for outcome in ours)
    num_steps = ours[0].curve[-1][0]
    measured_s = statistics.mean(outcome.step_s for outcome in ours)
    time_s = price or (lambda steps: steps * measured_s)
    last = statistics.mean(outcome.curve[-1][1] for outcome in reference)
    target = last + within * abs(last)
    steps = find_step(mean_curve([outcome.curve for outcome in ours]), target)
    accuracies = [outcome.accuracy for outcome in ours if outcome.accuracy is not None]
    mean_ratio = compare_means(losses, [outcome.loss for outcome in reference])
    return WayRow(
        way=way,
        is_reference=ours is reference,
        num_seeds=len(ours),
        loss=statistics.mean(losses),
        losses=losses,
        loss_ratio=mean_ratio.ratio,
        loss_ratio_lower=mean_ratio.lower,
        loss_ratio_upper=mean_ratio.upper,
        accuracy=statistics.mean(accuracies) if accuracies else None,
        bytes_per_step=statistics.mean(outcome.wire_bytes for outcome in ours) / num_steps,
        step_s=time_s(num_steps) / num_steps,
        steps_to_loss=steps,
        time_to_loss_s=None if steps is None else time_s(steps),
    )


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves, at the steps that all of them have."""
    tables = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    return [(step, statistics.mean(table[step] for table in tables)) for step in steps]


def find_step(curve: Curve, target: float) -> float | None:
    """Return the step at which a curve is first at most `target`; None if it never is.

    It is straight between two points. Before the first point nothing is known, so that point's step is the earliest.
    """
    before: tuple[int, float] | None = None
    for step, loss in curve:
        if loss <= target:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (step, loss)
    return None


def sort_rows(rows: Sequence[WayRow]) -> list[WayRow]:
    """Return rows by time to equal loss; then those that did not reach it, by loss; then those that failed."""

    def place(row: WayRow) -> tuple[bool, bool, float]:
        value = row.loss_ratio if row.time_to_loss_s is None else row.time_to_loss_s
        return bool(row.failure), row.time_to_loss_s is None, float("inf") if value is None else value

    return sorted(rows, key=place)


def advise(rows: Sequence[WayRow], place: str, within: float) -> str:
    """Return one sentence: which way to take, how much faster it is, and what it costs in loss.

    Only ways that end within `LIMIT` are advised.

    Args:
        rows: Rows of all ways.
        place: Words for the network, such as ``on 4 hosts at 50 Mbit/s``.
        within: Margin of equal loss.
    """
    reference = next(row for row in rows if row.is_reference)
    timed = [row for row in rows if row.time_to_loss_s is not None and row.is_within_limit]
    best = min(timed, key=lambda row: row.time_to_loss_s or 0.0)
    assert reference.time_to_loss_s is not None, "it ends with its own loss"
    assert best.time_to_loss_s is not None
    assert best.loss_ratio is not None
    gain = reference.time_to_loss_s / best.time_to_loss_s
    goal = f"within {100 * within:g} % of its last loss"
    if best.is_reference or gain < _LEAST_GAIN:
        return f"Stay with {reference.way}: {place} no other way is {_LEAST_GAIN:g} times as fast {goal}."
    worse = 100 * (best.loss_ratio - 1)
    return (
        f"Take {best.way}: {place} it needs {duration(best.time_to_loss_s)} where {reference.way} needs "
        f"{duration(reference.time_to_loss_s)} ({gain:.1f} times as fast) to come {goal}, and its own loss ends "
        f"{abs(worse):.2f} % {'higher' if worse > 0 else 'lower'}."
    )


def _or_empty(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)
