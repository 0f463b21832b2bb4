"""The loss and metrics over held-out data, divided among the workers."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from paceline.comm.group import Group
from paceline.comm.progress import BETWEEN, PROGRESS
from paceline.data.bad_samples import BadSampleCount, BadSamples, read_without_bad
from paceline.data.base import IterableSource, Source
from paceline.data.batch import Batch, list_tensors
from paceline.data.order import Interval, apportion
from paceline.errors import DataError
from paceline.parallel.model_shard import ModelShard
from paceline.replica.loss import Loss
from paceline.sync.batch_statistics import pooled_over_workers
from paceline.training.metrics import Metrics, Recorder, Sums
from paceline.training.objective import Objective

_LOST = "lost samples"
"""Key of the number of samples that could not be read, beside the sums of losses and metrics."""


@dataclass(frozen=True)
class Evaluation:
    """Means over the held-out samples, the same on every worker; NaN for a total weight of 0."""

    loss: float
    weight: float
    """Number of samples, or tokens, in the loss."""
    metrics: dict[str, float]
    num_samples: int
    duration_s: float


class Evaluable(Protocol):
    """A model that can be evaluated: a replica, or a model loaded for evaluation."""

    @property
    def shard(self) -> ModelShard:
        """Model shard of this rank."""

    @property
    def module(self) -> nn.Module:
        """The module itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module forward in its precision."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of forward."""

    def consensus(self) -> AbstractContextManager[None]:
        """Return the context in which parameters are the consensus of all workers."""

    def averaged(self) -> AbstractContextManager[None]:
        """Return the context in which parameters are their moving averages."""


def evaluate(
    model: Evaluable,
    objective: Objective,
    source: Source | IterableSource,
    *,
    batch_size: int,
    metrics: Metrics | None = None,
    max_samples: int | None = None,
    averaged: bool = False,
    is_stopped: Callable[[], bool] = lambda: False,
    bad_samples: BadSampleCount | None = None,
) -> Evaluation | None:
    """Return the loss and metrics over held-out samples.

    The samples are divided among the workers; sums and their weights are added, so the result does not depend on the
    number of workers. BatchNorm uses the statistics pooled over all workers.

    Args:
        model: Model to evaluate.
        objective: The loss.
        source: Held-out samples.
        batch_size: Samples per batch on each worker.
        metrics: Metrics beside the loss.
        max_samples: Number of samples of `source` to use, the first ones; None for all.
        averaged: Whether to evaluate the moving averages of parameters.
        is_stopped: Function that returns whether to stop early; if it does on any worker the result is None on all.
        bad_samples: Count of samples that cannot be read, and are left out unless its settings are fatal; None for the
            first one to be an error.
    """
    began_s = time.perf_counter()
    PROGRESS.enter(time.monotonic(), b"evaluate")
    shard = model.shard
    if isinstance(source, Source):
        source.watch(model.module)
    num_samples = min(len(source), max_samples or len(source)) if isinstance(source, Source) else 0
    was_training = {module: module.training for module in model.module.modules()}
    model.module.eval()
    sums: Sums = {}
    parameters = model.averaged() if averaged else model.consensus()
    with (
        _restoring(was_training),
        torch.no_grad(),
        parameters,
        pooled_over_workers(model.module, shard.statistics_group),
    ):
        for batch in _read(source, shard, batch_size, max_samples, bad_samples or BadSampleCount(BadSamples())):
            if isinstance(source, IterableSource):
                num_samples = batch.interval.stop
            elif shard.counts_loss and batch.num_samples < batch.interval.num_samples:
                lost = batch.interval.num_samples - batch.num_samples
                sums[_LOST] = (sums.get(_LOST, (0.0, 0.0))[0] + lost, 0.0)
            if is_stopped():
                sums["stopped"] = (1.0, 0.0)
                if shard.is_whole:
                    break
            for name, (total, weight) in _judge(
                model, objective, metrics, shard.split_context(batch.to(shard.world.device))
            ):
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + total, before[1] + weight)
    totals = _add_over_workers(sums, shard.world)
    PROGRESS.enter(time.monotonic(), BETWEEN)
    if "stopped" in totals:
        return None
    num_samples -= int(totals.pop(_LOST, (0.0, 0.0))[0])
    check_samples(num_samples)
    means = {name: total / weight if weight else math.nan for name, (total, weight) in totals.items()}
    return Evaluation(means.pop("loss"), totals["loss"][1], means, num_samples, time.perf_counter() - began_s)


@contextmanager
def _restoring(was_training: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Restore in the end, also after an error, whether modules train: training may go on without lost workers."""
    try:
        yield
    finally:
        for module, training in was_training.items():
            module.training = training


def check_samples(num_samples: int) -> None:
    """Raise DataError if there are no held-out samples."""
    if not num_samples:
        raise DataError(
            "held-out data must have samples, but there are none; hold out some, or leave the held-out part out to "
            "train without evaluation"
        )


def _read(
    source: Source | IterableSource,
    shard: ModelShard,
    batch_size: int,
    max_samples: int | None,
    bad_samples: BadSampleCount,
) -> Iterator[Batch]:
    """Yield this rank's batches.

    Ranks that share a model run it together, all equally often: ranks with fewer samples borrow some.
    """
    rank, num_workers = shard.data_parallel_group.rank, shard.data_parallel_group.size
    if isinstance(source, IterableSource):
        samples, position = itertools.islice(source, max_samples), 0
        while chunk := list(itertools.islice(samples, batch_size * num_workers)):
            shares = apportion(len(chunk), [1.0] * num_workers)
            start, stop = sum(shares[:rank]), sum(shares[: rank + 1])
            interval = Interval(position, position + len(chunk))
            position = interval.stop
            yield Batch(source.collate(chunk[start:stop] or chunk[:1]), stop - start, interval)
        return
    num_samples = min(len(source), max_samples or len(source))
    shares = apportion(num_samples, [1.0] * num_workers)
    start, stop = sum(shares[:rank]), sum(shares[: rank + 1])
    length = shares[rank] if shard.is_whole else shares[0]
    for first in range(start, start + length, batch_size):
        interval = Interval(min(first, stop), min(first + batch_size, stop))
        places = np.arange(*interval, dtype=np.int64) if interval.num_samples else np.zeros(1, dtype=np.int64)
        data, num_lost = read_without_bad(source, places, bad_samples)
        yield Batch(data, max(0, interval.num_samples - num_lost), interval)


def _judge(
    model: Evaluable, objective: Objective, metrics: Metrics | None, batch: Batch
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the sums of a batch on the rank that counts them; nothing on others that take part in it."""
    pipeline, recorder = model.shard.pipeline, Recorder(model)
    if pipeline is None:
        with model.shard.evaluation_context():
            loss = objective.loss(recorder if metrics is not None else model, batch)
            loss = replace(loss, mean=loss.whole_mean)
        # All ranks that share the model measure, since a metric may call it again.
        measured = metrics.measure(recorder, recorder.output_of(batch), batch) if metrics is not None else {}
    else:
        with model.autocast():
            output = pipeline.evaluate(tuple(list_tensors(batch.inputs)))
        if output is None:
            return
        loss = objective.loss_of_output(output, batch)
        measured = metrics.measure(recorder, output, batch) if metrics is not None else {}
    if model.shard.counts_loss:
        yield from (_sums_of(loss) | measured).items()


def _sums_of(loss: Loss) -> Sums:
    if not loss.weight:  # the mean may be NaN
        return dict.fromkeys(("loss", *loss.totals), (0.0, 0.0))
    totals = {name: (float(total), loss.weight) for name, total in loss.totals.items()}
    return {"loss": (float(loss.mean) * loss.weight, loss.weight)} | totals


def _add_over_workers(sums: Sums, group: Group) -> Sums:
    totals: Sums = {}
    mine = {name: [repr(value) for value in pair] for name, pair in sums.items()}
    for document in group.gather_documents(mine, name="evaluation"):
        for name, (total, weight) in document.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + float(total), before[1] + float(weight))
    return totals
