"""The loss over held-out data, divided among the workers."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from paceline.comm.group import Group
from paceline.data.base import Source
from paceline.data.batch import Batch, list_tensors
from paceline.data.order import Interval, apportion
from paceline.replica.loss import Loss
from paceline.replica.replica import Replica
from paceline.sync.batch_statistics import pooled_over_workers
from paceline.training.objective import Objective


@dataclass(frozen=True)
class Evaluation:
    """Means over the held-out samples, the same on every worker."""

    loss: float
    metrics: dict[str, float]
    num_samples: int
    duration_s: float


def evaluate(
    replica: Replica,
    objective: Objective,
    source: Source,
    *,
    batch_size: int,
    max_samples: int | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Return the loss and metrics over the first `max_samples` of `source` (over all without it).

    The samples are cut among the workers; sums and their weight are added, so the result does not depend on how many
    there are. BatchNorm uses the statistics pooled over all workers. Once `is_stopped` says so on some
    worker that one ends early, and the result is None on all.
    """
    began_s = time.perf_counter()
    shard = replica.shard
    rank, num_workers = shard.data_parallel_group.rank, shard.data_parallel_group.size
    num_samples = min(len(source), max_samples or len(source))
    shares = apportion(num_samples, [1.0] * num_workers)
    start, stop = sum(shares[:rank]), sum(shares[: rank + 1])
    # Ranks that share a model run it together: as often as who has most samples needs, and to the end.
    length = shares[rank] if shard.is_whole else shares[0]
    was_training = {module: module.training for module in replica.module.modules()}
    replica.module.eval()
    sums: dict[str, float] = {}
    with torch.no_grad(), replica.consensus(), pooled_over_workers(replica.module, shard.statistics_group):
        for first in range(start, start + length, batch_size):
            if is_stopped():
                sums["stopped"] = 1.0
                if shard.is_whole:
                    break
            interval = Interval(min(first, stop), min(first + batch_size, stop))
            places = np.arange(*interval, dtype=np.int64) if interval.num_samples else np.zeros(1, dtype=np.int64)
            batch = Batch(source.read(places), interval.num_samples, interval).to(replica.group.device)
            loss = _loss(replica, objective, shard.split_context(batch))
            if loss is None or not loss.weight:
                continue
            parts = {"loss": float(loss.mean) * loss.weight, "weight": loss.weight}
            parts |= {f"metric {name}": float(total) for name, total in loss.totals.items()}
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + value
    for module, training in was_training.items():
        module.training = training
    totals = _add_over_workers(sums, shard.world)
    if "stopped" in totals:
        return None
    weight = totals.pop("weight")
    metrics = {name.removeprefix("metric "): total / weight for name, total in totals.items() if name != "loss"}
    return Evaluation(totals["loss"] / weight, metrics, num_samples, time.perf_counter() - began_s)


def _loss(replica: Replica, objective: Objective, batch: Batch) -> Loss | None:
    """Return the loss where it counts, and None on other ranks that take part in it."""
    pipeline = replica.shard.pipeline
    if pipeline is None:
        loss = objective.loss(replica, batch)
    else:
        with replica.autocast():
            output = pipeline.evaluate(tuple(list_tensors(batch.inputs)))
        if output is None:
            return None
        loss = objective.loss_of_output(output, batch)
    return loss if replica.shard.counts_loss else None


def _add_over_workers(sums: dict[str, float], group: Group) -> dict[str, float]:
    totals: dict[str, float] = {}
    for document in group.gather_documents({name: repr(value) for name, value in sums.items()}, name="evaluation"):
        for name, value in document.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals
