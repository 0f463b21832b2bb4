"""A small network on images with batches up to 128 times as large, for the same number of epochs."""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn

from paceline.benchmarks.loss_picture import Curve, draw_losses
from paceline.benchmarks.reproductions.base import Reproduction
from paceline.benchmarks.tables import TableRow
from paceline.comm.local_group import LocalGroup
from paceline.data import IterableSource, Spec
from paceline.data.images import Images
from paceline.errors import NonFiniteError, SettingsError
from paceline.monitor.log import EventLog
from paceline.monitor.reader import RunSummary, read_log, summarise
from paceline.optim import LAMB, LARS, SGD, Adam, NamedOptimizer, Optimizer
from paceline.registry import register
from paceline.schedules import Linear
from paceline.training.loop import train
from paceline.training.model import Model
from paceline.training.objective import Classification
from paceline.training.run import Run

_PUBLISHED = {1: "256: 24 h, 76.3%", 32: "8,192: 2.2 h, 76.1%", 128: "32,768: 1.2 h, 75.8%"}
"""Batch, hours to 75% and top-1 accuracy of ResNet-50 on ImageNet, by how many times the smallest the batch is."""

Way = Literal["sgd", "linear", "linear, warm-up", "adam, warm-up", "lars, warm-up", "lamb, warm-up"]
_DRAWN: tuple[Way, ...] = ("linear, warm-up", "adam, warm-up", "lamb, warm-up")
_NUM_POINTS = 60


@register("perceptron")
class Perceptron(Model):
    """Settings of fully connected layers, each normalised within a sample (Ba et al. 2016) and cut off below 0."""

    widths: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers."""

    def build(self, spec: Spec) -> nn.Module:
        """Return a new network."""
        widths = [torch.Size(spec.input_shape).numel(), *self.widths]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], spec.num_classes))


@dataclass(frozen=True)
class LargeBatchRow(TableRow):
    """One way to train with one batch: differences are paired by seed."""

    headings = ("way", "batch", "steps", "learning rate", "held-out accuracy", "to SGD at the smallest", "published")

    way: str
    batch: int
    num_steps: int
    num_seeds: int
    learning_rate: float
    """Largest."""
    accuracy: float | None
    """Median over the seeds that did not diverge."""
    difference: float | None
    """Median over the same, in percentage points."""
    num_diverged: int
    published: str

    def cells(self) -> tuple[str, ...]:
        """Return it as texts."""
        diverged = f"{self.num_diverged} of {self.num_seeds} diverged" if self.num_diverged else ""
        accuracy = "" if self.accuracy is None else f"{100 * self.accuracy:.2f}%"
        return (
            self.way,
            f"{self.batch:,}",
            f"{self.num_steps:,}",
            f"{self.learning_rate:.3g}",
            ", ".join(text for text in (accuracy, diverged) if text),
            "" if self.difference is None else f"{self.difference:+.2f}",
            self.published,
        )


@register("large-batch")
class LargeBatch(Reproduction):
    """Accuracy of the same number of epochs at batches from 64 to 8,192, with and without what large batches need.

    Fully connected layers on images, by default scikit-learn's digits; `--data.path` takes an IDX pair such as MNIST's.
    Every learning rate is meant for the smallest batch. The ways are SGD with momentum at that rate; with the rate in
    proportion to the batch; the same after a warm-up; and Adam, LARS and LAMB with the root of the batch, after a
    warm-up. All decay to 0 on a straight line. A larger batch takes fewer steps: that is what saves time where there
    are workers to share a step, which this process, alone, does not have. Batches larger than half of the data are left
    out.
    """

    data: Images = Images(size=8)
    """Data to train on."""
    model: Model = Perceptron()
    """Model to train."""
    batches: tuple[int, ...] = (64, 512, 2048, 8192)
    """Global batches, the smallest first."""
    num_epochs: int = Field(default=8, ge=1)
    warmup_fraction: float = Field(default=0.2, ge=0, lt=1)
    """Fraction of the steps for warm-up, where there is one."""
    num_seeds: int = Field(default=2, ge=1)
    """Runs of each way with each batch."""
    sgd: SGD = SGD(learning_rate=0.01)
    adam: Adam = Adam(learning_rate=1e-3)
    lars: LARS = LARS(learning_rate=0.05, trust_coefficient=0.1)
    lamb: LAMB = LAMB(learning_rate=5e-3)
    picture: Path | None = None
    """Also draw training losses of SGD, Adam and LAMB at the smallest and the largest batch into this new file, .png or
    .svg."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise ValueError(f"batches must be ascending and at least 1, but got {self.batches}; sort them")
        if self.picture is not None and (self.picture.exists() or self.picture.suffix not in (".png", ".svg")):
            raise ValueError(
                f"picture must be a new file that ends in .png or .svg, but got {self.picture}; choose another"
            )
        return self

    def reproduce(self) -> list[LargeBatchRow]:
        """Train each way with each batch and seed."""
        train = self.data.open().train
        assert not isinstance(train, IterableSource)
        num_samples = len(train)
        batches = [batch for batch in self.batches if 2 * batch <= num_samples]
        if not batches:
            raise SettingsError(
                f"batches must be at most half of the {num_samples} samples, but got {self.batches}; give smaller ones"
            )
        summaries = {
            (way, batch): [_train(self.make_run(way, batch, num_samples, seed)) for seed in range(self.num_seeds)]
            for batch in batches
            for way in self.ways(batch)
        }
        if self.picture is not None:
            panels = {
                f"batch {batch:,}": [_curve(way, summaries[way, batch][0], num_samples) for way in _DRAWN]
                for batch in (batches[0], batches[-1])
            }
            self.picture.write_bytes(draw_losses(panels, self.picture.suffix[1:], x_label="epochs"))
        reference = summaries["sgd", batches[0]]
        return [self.describe(way, batch, ours, reference) for (way, batch), ours in summaries.items()]

    def ways(self, batch: int) -> tuple[Way, ...]:
        """Return the ways that differ at a batch: at the smallest nothing is scaled."""
        scaled: tuple[Way, ...] = ("linear",) if batch != self.batches[0] else ()
        return ("sgd", *scaled, "linear, warm-up", "adam, warm-up", "lars, warm-up", "lamb, warm-up")

    def make_run(self, way: Way, batch: int, num_samples: int, seed: int) -> Run:
        """Return the run of a way with a batch."""
        kind, _, warm_up = way.partition(", ")
        optimizers: dict[str, Optimizer] = {"adam": self.adam, "lars": self.lars, "lamb": self.lamb}
        scaling = {"sgd": "none", "linear": "linear"}.get(kind, "square_root")
        num_steps = -(-num_samples // batch) * self.num_epochs
        return Run(
            model=self.model,
            data=self.data,
            loss=Classification(),
            global_batch=batch,
            num_steps=num_steps,
            optimizer=optimizers.get(kind, self.sgd).model_copy(
                update={"scaling": scaling, "base_batch": self.batches[0]}
            ),
            schedule=Linear(warmup_steps=round(self.warmup_fraction * num_steps) if warm_up else 0),
            clip_norm=None,
            seed=seed,
            evaluate_interval=0,
            checkpoint_interval=0,
            timeline_interval=0,
            num_threads=1,
        )

    def describe(
        self, way: Way, batch: int, ours: Sequence[RunSummary], reference: Sequence[RunSummary]
    ) -> LargeBatchRow:
        """Return the row of a way with a batch, from its runs and those of SGD with the smallest batch, by seed."""
        pairs = [(_accuracy(a), _accuracy(b)) for a, b in zip(ours, reference, strict=True)]
        accuracies = [a for a, _ in pairs if a is not None]
        differences = [100 * (a - b) for a, b in pairs if a is not None and b is not None]
        run = self.make_run(way, batch, 1, 0)
        assert isinstance(run.optimizer, NamedOptimizer)
        return LargeBatchRow(
            way=way,
            batch=batch,
            num_steps=max(len(summary.steps) for summary in ours),
            num_seeds=len(ours),
            learning_rate=run.optimizer.learning_rate * run.optimizer.scale_rate(batch),
            accuracy=statistics.median(accuracies) if accuracies else None,
            difference=statistics.median(differences) if differences else None,
            num_diverged=len(ours) - len(accuracies),
            published=_PUBLISHED.get(batch // self.batches[0], "") if batch % self.batches[0] == 0 else "",
        )


def _train(run: Run) -> RunSummary:
    """Return how a run went, alone in this process; one that diverges ends early."""
    with tempfile.TemporaryDirectory(prefix="paceline-reproduce-") as folder:
        directory = Path(folder)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with EventLog(directory / "events.jsonl", run="large-batch", rank=0) as log:
                if not train(run, directory, LocalGroup(), log, recipe="large-batch"):
                    raise KeyboardInterrupt  # a signal ended the run, and is meant for all of them
        except NonFiniteError:
            pass
        finally:
            torch.set_num_threads(num_threads)
        return summarise(read_log(directory / "events.jsonl"))


def _accuracy(summary: RunSummary) -> float | None:
    """Return the accuracy on held-out images; None where training diverged."""
    return None if summary.finish is None else summary.finish.event.metrics["accuracy"]


def _curve(way: Way, summary: RunSummary, num_samples: int) -> Curve:
    """Return training losses over epochs, each point a mean over some steps."""
    losses = [step.event.loss for step in summary.steps]
    epochs = [step.event.position / num_samples for step in summary.steps]
    size = -(-len(losses) // _NUM_POINTS)
    starts = range(0, len(losses), size)
    points = [(epochs[min(i + size, len(epochs)) - 1], statistics.fmean(losses[i : i + size])) for i in starts]
    return Curve({"linear": "SGD", "adam": "Adam", "lamb": "LAMB"}[way.partition(", ")[0]], points)
