"""A Transformer language model on four workers: synchronous, asynchronous, and synchronous with compression."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from paceline.benchmarks.reproductions.base import Reproduction, Straggling, train_once
from paceline.benchmarks.tables import TableRow
from paceline.benchmarks.workers import Workers
from paceline.compression import Codec, Int8
from paceline.monitor.reader import RunSummary
from paceline.recipes import transformer_lm
from paceline.registry import register
from paceline.sync import ASGD, EveryStep, Rule
from paceline.training.run import Run

_PUBLISHED = {"synchronous": (45, 18.3), "asynchronous": (38, 18.7), "compression": (41, 18.5)}
"""Minutes an epoch and perplexity, of a Transformer language model on four workers."""


@dataclass(frozen=True)
class SyncRow(TableRow):
    """One way to synchronise beside the synchronous one: ratios are paired by seed."""

    headings = (
        "way", "waiting", "time", "to synchronous", "published", "perplexity", "to synchronous", "published",
    )  # fmt: skip

    way: str
    num_seeds: int
    communication_share: float | None
    """Fraction of a step's time that rank 0 waits for others."""
    duration_s: float
    time_ratio: float
    perplexity: float
    perplexity_ratio: float
    published_minutes: float
    published_perplexity: float

    def cells(self) -> tuple[str, ...]:
        """Return it as texts."""
        minutes, perplexity = _PUBLISHED["synchronous"]
        share = self.communication_share
        return (
            self.way,
            "" if share is None else f"{share:.0%}",
            f"{self.duration_s:.1f} s",
            f"{self.time_ratio:.3f}",
            f"{self.published_minutes / minutes:.3f} ({self.published_minutes:g} min)",
            f"{self.perplexity:.3f}",
            f"{self.perplexity_ratio:.3f}",
            f"{self.published_perplexity / perplexity:.3f} ({self.published_perplexity:g})",
        )


@register("language-model-sync")
class LanguageModelSync(Reproduction):
    """Time and perplexity of a Transformer language model: synchronous, asynchronous, and with compression.

    The Transformer recipe (0.8M parameters, bytes of the standard library's source) at the same number of samples,
    which stands for the epoch; perplexity is exp(held-out loss), of a byte. Times can only differ as they do there
    where waiting takes a part of the synchronous step: asynchronous workers saved a sixth of it. Machines that others
    share are slow now and then, and all wait for the slowest; here workers are by a script, the same for each way.
    By default workers are processes of this machine, which takes no rights; `--hosts 4 --bandwidth 250mbit` adds a
    network that takes about half of a step of this model on two cores. Asynchronous steps are of the pushes
    of as many workers as there are, whoever's they are, at the same learning rate; with fewer to a step it is lower by
    the square root of their share, as is usual with Adam.
    """

    num_steps: int = Field(default=300, ge=1)
    """Global batches."""
    global_batch: int = Field(default=16, ge=1)
    num_seeds: int = Field(default=3, ge=1)
    """Runs of each way; ways are run in turn."""
    max_bytes: int = Field(default=8_000_000, ge=1)
    """Text that is read."""
    learning_rate: float = Field(default=7e-4, gt=0)
    """Learning rate; at the recipe's own, three times as high, AdamW diverges with stale gradients."""
    asynchronous: ASGD = ASGD(
        num_servers=4, pushes_per_step=4, correct_momentum=True, least_momentum=0.0, warmup_steps=0
    )
    """Asynchronous rule; with a server beside each worker no link carries more than in an all-reduce."""
    codec: Codec = Int8()
    """The compression."""
    slow_chance: float = Field(default=0.1, ge=0, le=1)
    """Probability that a worker's step is slow; 0 for never."""
    slow_s: float = Field(default=0.5, ge=0)
    """Delay of a slow step: by default one to two steps of two cores."""
    workers: Workers = Workers(num_workers=4)
    """Workers of the benchmark."""

    def reproduce(self) -> list[SyncRow]:
        """Train each way with each seed."""
        summaries: dict[str, list[RunSummary]] = {way: [] for way in _PUBLISHED}
        for seed in range(self.num_seeds):
            for way, of_way in summaries.items():
                run = self.make_run(way, seed)
                of_way.append(
                    train_once(run, "transformer_lm", self.workers, Straggling(self.slow_chance, self.slow_s))
                )
        return [describe(way, of_way, summaries["synchronous"]) for way, of_way in summaries.items()]

    def make_run(self, way: str, seed: int) -> Run:
        """Return the run of a way."""
        run = transformer_lm.run()
        rules: dict[str, Rule] = {
            "synchronous": EveryStep(),
            "asynchronous": self.asynchronous,
            "compression": EveryStep(codec=self.codec),
        }
        share = min(1.0, self.asynchronous.pushes_per_step / self.workers.num_workers)
        factor = math.sqrt(share) if way == "asynchronous" else 1.0
        rate = self.learning_rate * factor
        return run.model_copy(
            update={
                "data": run.data.model_copy(update={"max_bytes": self.max_bytes}),
                "optimizer": run.optimizer.model_copy(update={"learning_rate": rate}),
                "loss": run.loss.model_copy(update={"sample_tokens": 0}),
                "sync": rules[way],
                "seed": seed,
                "num_steps": self.num_steps,
                "global_batch": self.global_batch,
                "evaluate_interval": 0,
                "checkpoint_interval": 0,
                "num_threads": 1,
            }
        )


def describe(way: str, ours: Sequence[RunSummary], reference: Sequence[RunSummary]) -> SyncRow:
    """Return the row of a way from its runs and those of the synchronous one, by seed."""
    times, losses = _results(ours)
    reference_times, reference_losses = _results(reference)
    shares = [summary.communication_share for summary in ours]
    known = [share for share in shares if share is not None]
    minutes, perplexity = _PUBLISHED[way]
    return SyncRow(
        way=way,
        num_seeds=len(ours),
        communication_share=statistics.median(known) if known else None,
        duration_s=statistics.median(times),
        time_ratio=statistics.median(a / b for a, b in zip(times, reference_times, strict=True)),
        perplexity=math.exp(statistics.median(losses)),
        perplexity_ratio=statistics.median(math.exp(a - b) for a, b in zip(losses, reference_losses, strict=True)),
        published_minutes=minutes,
        published_perplexity=perplexity,
    )


def _results(summaries: Sequence[RunSummary]) -> tuple[list[float], list[float]]:
    """Return seconds of training and held-out losses."""
    finishes = [summary.finish.event for summary in summaries if summary.finish is not None]
    return [f.duration_s for f in finishes], [f.held_out_loss for f in finishes if f.held_out_loss is not None]
