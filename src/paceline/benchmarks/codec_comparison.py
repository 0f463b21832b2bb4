"""`compare codecs`: what each codec does to a training: bytes sent, and held-out results beside those without it."""

import statistics
from dataclasses import dataclass

from paceline.benchmarks.comparison import Outcomes, Overrides, RunComparison
from paceline.benchmarks.tables import TableRow

_PUBLISHED = {"none": "1x / 0", "top_k": "100x / 0.3", "int8": "4x / 0.1", "one_bit": "32x / 0.5"}
"""Compression and loss of top-1 accuracy in percent, as surveys of gradient compression give them."""


@dataclass(frozen=True)
class CodecRow(TableRow):
    """One codec beside none: differences are paired by seed."""

    headings = (
        "codec", "compression", "held-out loss", "to none's", "accuracy", "difference %", "time to none's", "published",
    )  # fmt: skip

    codec: str
    num_seeds: int
    compression: float
    """Bytes sent without a codec to bytes sent with it."""
    loss: float
    loss_ratio: float
    """Median over seeds of held-out loss to that without a codec."""
    accuracy: float | None
    accuracy_difference: float | None
    """Mean over seeds, in percent."""
    accuracy_spread: float | None
    """Standard deviation of that difference over seeds, in percent."""
    time_ratio: float
    published: str

    def cells(self) -> tuple[str, ...]:
        """Return it as texts."""
        spread = "" if self.accuracy_spread is None else f" ± {self.accuracy_spread:.2f}"
        return (
            self.codec,
            f"{self.compression:.1f}x",
            f"{self.loss:.4f}",
            f"{self.loss_ratio:.3f}",
            "" if self.accuracy is None else f"{100 * self.accuracy:.2f}%",
            "" if self.accuracy_difference is None else f"{self.accuracy_difference:+.2f}{spread}",
            f"{self.time_ratio:.2f}",
            self.published,
        )


def _describe(codec: str, overrides: Overrides, ours: Outcomes, reference: Outcomes) -> CodecRow:
    pairs = list(zip(ours, reference, strict=True))
    differences = [
        100 * (a.accuracy - b.accuracy) for a, b in pairs if a.accuracy is not None and b.accuracy is not None
    ]
    return CodecRow(
        codec=codec,
        num_seeds=len(ours),
        compression=reference[0].wire_bytes / ours[0].wire_bytes,
        loss=statistics.median(outcome.loss for outcome in ours),
        loss_ratio=statistics.median(a.loss / b.loss for a, b in pairs),
        accuracy=statistics.median(o.accuracy for o in ours if o.accuracy is not None) if differences else None,
        accuracy_difference=statistics.mean(differences) if differences else None,
        accuracy_spread=statistics.stdev(differences) if len(differences) > 1 else None,
        time_ratio=statistics.median(a.elapsed_s / b.elapsed_s for a, b in pairs),
        published=_PUBLISHED.get(codec, ""),
    )


def _make_ways(num_steps: int) -> dict[str, Overrides]:
    return {
        "none": [],
        "int8": [("sync.codec", "int8")],
        "one_bit": [("sync.codec", "one_bit")],
        "top_k": [("sync.codec", "top_k")],
        "top_k without feedback": [("sync.codec", "top_k"), ("sync.codec.error_feedback", "false")],
        "random_k": [("sync.codec", "random_k")],
        "power_sgd": [("sync.codec", "power_sgd")],
        "bf16": [("sync.codec", "bf16")],
        "fp16": [("sync.codec", "fp16")],
    }


CODEC_COMPARISON = RunComparison(_make_ways, _describe)
