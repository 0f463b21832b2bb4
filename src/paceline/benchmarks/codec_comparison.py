"""What each codec does to a training: bytes sent, and held-out results beside those without it."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Overrides = list[tuple[str, str]]

CODECS: dict[str, Overrides] = {
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
"""What is compared, by name: the overrides of a run."""

PUBLISHED = {"none": "1x / 0", "top_k": "100x / 0.3", "int8": "4x / 0.1", "one_bit": "32x / 0.5"}
"""Compression and loss of top-1 accuracy in percent, as surveys of gradient compression give them."""


@dataclass(frozen=True)
class Outcome:
    """How one run ended."""

    loss: float
    """Held out."""
    accuracy: float | None
    wire_bytes: int
    """What one worker sent in all steps."""
    seconds: float


@dataclass(frozen=True)
class CodecRow:
    """One codec beside none: differences are paired by seed."""

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


def compare(outcomes: Mapping[str, Sequence[Outcome]]) -> list[CodecRow]:
    """Return a row for each codec, from outcomes by codec and seed; ``none`` must be among them."""
    reference = outcomes["none"]
    return [_compare(codec, ours, reference) for codec, ours in outcomes.items()]


def _compare(codec: str, ours: Sequence[Outcome], reference: Sequence[Outcome]) -> CodecRow:
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
        time_ratio=statistics.median(a.seconds / b.seconds for a, b in pairs),
        published=PUBLISHED.get(codec, ""),
    )


HEADINGS = (
    "codec", "compression", "held-out loss", "to none's", "accuracy", "difference %", "time to none's", "published",
)  # fmt: skip


def cells(row: CodecRow) -> tuple[str, ...]:
    """Return a row as texts, under `HEADINGS`."""
    spread = "" if row.accuracy_spread is None else f" ± {row.accuracy_spread:.2f}"
    difference = "" if row.accuracy_difference is None else f"{row.accuracy_difference:+.2f}{spread}"
    return (
        row.codec,
        f"{row.compression:.1f}x",
        f"{row.loss:.4f}",
        f"{row.loss_ratio:.3f}",
        "" if row.accuracy is None else f"{100 * row.accuracy:.2f}%",
        difference,
        f"{row.time_ratio:.2f}",
        row.published,
    )


def as_document(rows: Sequence[CodecRow]) -> list[dict[str, Any]]:
    """Return rows as JSON."""
    return [asdict(row) for row in rows]
