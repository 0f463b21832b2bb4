"""`compare sync`: what each synchronisation rule does to a training: held-out loss, bytes sent and time."""

import statistics
from dataclasses import dataclass

from paceline.benchmarks.comparison import Outcomes, Overrides, RunComparison, compare_means
from paceline.benchmarks.tables import TableRow


@dataclass(frozen=True)
class RuleRow(TableRow):
    """One rule beside every_step, at the same number of samples."""

    headings = (
        "rule", "settings", "seeds", "held-out loss", "to every_step's", "95% above", "95% below",
        "bytes to every_step's", "time to every_step's",
    )  # fmt: skip

    rule: str
    settings: str
    """Settings of the rule that differ from its defaults."""
    num_seeds: int
    loss: float
    """Mean over seeds."""
    losses: tuple[float, ...]
    """Losses by seed."""
    loss_ratio: float
    """Mean of the losses to the mean of those of every_step."""
    loss_ratio_lower: float | None
    """Lower bound of its bootstrap 95% interval (one-sided); None with one seed."""
    loss_ratio_upper: float | None
    """Upper bound likewise."""
    bytes_ratio: float
    """Ratio of rank 0's sent bytes to those with every_step."""
    time_ratio: float

    def cells(self) -> tuple[str, ...]:
        """Return it as texts."""
        bounds = ("" if bound is None else f"{bound:.4f}" for bound in (self.loss_ratio_lower, self.loss_ratio_upper))
        return (
            self.rule,
            self.settings,
            str(self.num_seeds),
            f"{self.loss:.4f}",
            f"{self.loss_ratio:.4f}",
            *bounds,
            f"{self.bytes_ratio:.4f}",
            f"{self.time_ratio:.2f}",
        )


def _describe(rule: str, overrides: Overrides, ours: Outcomes, reference: Outcomes) -> RuleRow:
    pairs = list(zip(ours, reference, strict=True))
    losses = tuple(outcome.loss for outcome in ours)
    mean_ratio = compare_means(losses, [outcome.loss for outcome in reference])
    return RuleRow(
        rule=rule,
        settings=", ".join(f"{name.removeprefix('sync.')} {value}" for name, value in overrides if name != "sync"),
        num_seeds=len(ours),
        loss=statistics.mean(losses),
        losses=losses,
        loss_ratio=mean_ratio.ratio,
        loss_ratio_lower=mean_ratio.lower,
        loss_ratio_upper=mean_ratio.upper,
        bytes_ratio=statistics.median(a.wire_bytes / b.wire_bytes for a, b in pairs),
        time_ratio=statistics.median(a.elapsed_s / b.elapsed_s for a, b in pairs),
    )


def _way(rule: str, **fields: object) -> Overrides:
    return [("sync", rule), *((f"sync.{name}", str(value)) for name, value in fields.items())]


def _make_ways(num_steps: int) -> dict[str, Overrides]:
    """Return rules at settings that suit some hundreds of steps: outer momentum begins after a synchronous quarter.

    Workers are no hosts here, so that two of them stand for one.
    """
    outer = {"period": 10, "synchronous_steps": num_steps // 4}
    return {
        "every_step": [],
        "local_sgd": _way("local_sgd", period=10),
        "post_local_sgd": _way("post_local_sgd", period=10, synchronous_steps=num_steps // 2),
        "hierarchical_local_sgd": _way("hierarchical_local_sgd", period=10, host_size=2),
        "adaptive_local_sgd": _way("adaptive_local_sgd"),
        "diloco": _way("diloco", **outer),
        "diloco int8": _way("diloco", **outer, codec="int8"),
        "streaming_diloco": _way("streaming_diloco", **outer),
        "streaming_diloco int8": _way("streaming_diloco", **outer, codec="int8"),
        "scaffold": _way("scaffold", period=10),
        "easgd": _way("easgd"),
        "dpsgd ring": _way("dpsgd", graph="ring"),
        "dpsgd exponential": _way("dpsgd", graph="exponential"),
        "push_sum": _way("push_sum"),
        "choco_sgd": _way("choco_sgd"),
        "parameter_server": _way("parameter_server"),
        "asgd": _way("asgd"),
        "ssp": _way("ssp"),
    }


SYNC_COMPARISON = RunComparison(_make_ways, _describe)
