"""`compare sync`: what each synchronisation rule does to a training: held-out loss, bytes sent and time."""

import statistics
from dataclasses import dataclass

from paceline.benchmarks.comparison import Comparison, Outcomes, Overrides
from paceline.benchmarks.tables import TableRow


@dataclass(frozen=True)
class RuleRow(TableRow):
    """One rule beside every_step, at the same number of samples: ratios are paired by seed."""

    headings = ("rule", "seeds", "held-out loss", "to every_step's", "bytes to every_step's", "time to every_step's")

    rule: str
    num_seeds: int
    loss: float
    loss_ratio: float
    """Mean over seeds of held-out loss to that of every_step."""
    loss_ratio_spread: float | None
    """Standard deviation of that ratio over seeds."""
    bytes_ratio: float
    """What rank 0 sent to what it sent with every_step."""
    time_ratio: float

    def cells(self) -> tuple[str, ...]:
        """Return it as texts."""
        spread = "" if self.loss_ratio_spread is None else f" ± {self.loss_ratio_spread:.4f}"
        return (
            self.rule,
            str(self.num_seeds),
            f"{self.loss:.4f}",
            f"{self.loss_ratio:.4f}{spread}",
            f"{self.bytes_ratio:.4f}",
            f"{self.time_ratio:.2f}",
        )


def _describe(rule: str, ours: Outcomes, reference: Outcomes) -> RuleRow:
    pairs = list(zip(ours, reference, strict=True))
    ratios = [a.loss / b.loss for a, b in pairs]
    return RuleRow(
        rule=rule,
        num_seeds=len(ours),
        loss=statistics.median(outcome.loss for outcome in ours),
        loss_ratio=statistics.mean(ratios),
        loss_ratio_spread=statistics.stdev(ratios) if len(ratios) > 1 else None,
        bytes_ratio=statistics.median(a.wire_bytes / b.wire_bytes for a, b in pairs),
        time_ratio=statistics.median(a.elapsed_s / b.elapsed_s for a, b in pairs),
    )


def _way(rule: str, **fields: str) -> Overrides:
    return [("sync", rule), *((f"sync.{name}", value) for name, value in fields.items())]


SYNC_COMPARISON = Comparison(
    ways={
        "every_step": [],
        "local_sgd": _way("local_sgd", period="10"),
        "post_local_sgd": _way("post_local_sgd", period="10", start="100"),
        "hierarchical_local_sgd": _way("hierarchical_local_sgd", period="10", host_size="2"),
        "adaptive_local_sgd": _way("adaptive_local_sgd"),
        "diloco": _way("diloco", period="10"),
        "diloco int8": _way("diloco", period="10", codec="int8"),
        "streaming_diloco": _way("streaming_diloco", period="10"),
        "streaming_diloco int8": _way("streaming_diloco", period="10", codec="int8"),
        "scaffold": _way("scaffold", period="10"),
        "easgd": _way("easgd"),
        "dpsgd ring": _way("dpsgd", graph="ring"),
        "dpsgd exponential": _way("dpsgd", graph="exponential"),
        "push_sum": _way("push_sum"),
        "choco_sgd": _way("choco_sgd"),
        "parameter_server": _way("parameter_server"),
        "asgd": _way("asgd"),
        "ssp": _way("ssp"),
    },
    describe=_describe,
)
"""Rules at settings that suit some hundreds of steps; workers are no hosts here, so that two of them stand for one."""
