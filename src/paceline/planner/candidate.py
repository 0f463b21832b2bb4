"""A candidate of the planner: one way to train, as numbers; as settings of training; and as a row that is priced."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

from paceline.parallel.pipeline.orders import OrderName
from paceline.parallel.pipeline.settings import PipelineSettings
from paceline.planner.inexact import Way
from paceline.topology import Cluster
from paceline.topology.layout import Layout

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "activations", "optimizer", "both"]
_OFFLOADED = {"activations": "activations", "optimizer": "optimizer", "both": "activations and optimizer"}


@dataclass(frozen=True)
class Machines:
    """Machines that are on offer.

    Args:
        name: Name of the cluster, as it was given.
        cluster: Hosts, devices and links.
        num_ranks: Most ranks.
        memory_bytes: Memory that a rank may use; None: its device's.
        price_per_hour: Price of a host and hour; None: not known.
        price_words: The price with its unit and origin.
        currency: Currency of the price; empty: not known.
        cap_w: Limit of a device's power that is to be set for the plan; None: as it is.
    """

    name: str
    cluster: Cluster
    num_ranks: int
    memory_bytes: float | None = None
    price_per_hour: float | None = None
    price_words: str = ""
    currency: str = ""
    cap_w: float | None = None

    @property
    def has_host_devices(self) -> bool:
        """Whether processors of hosts compute, beside which there is no other memory to offload to."""
        return self.cluster.device is not None and self.cluster.device.is_host


@dataclass(frozen=True, slots=True)
class Division:
    """The ranks of one way to train, and the order of its pipeline.

    Args:
        data: Replicas.
        sharded: Ranks that share the state of a replica.
        zero_stage: State that they share.
        context: Ranks that share sequences.
        tensor: Ranks that share matrices.
        pipeline: Ranks that share layers.
        order: Order of the pipeline.
        stages_per_rank: Stages of each of its ranks.
    """

    data: int = 1
    sharded: int = 1
    zero_stage: int = 3
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    order: OrderName = "1f1b"
    stages_per_rank: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.data * self.sharded * self.context * self.tensor * self.pipeline

    @property
    def num_workers(self) -> int:
        """Number of workers, each with samples of its own."""
        return self.data * self.sharded

    @property
    def ranks_of_worker(self) -> int:
        """Number of ranks that see the same samples."""
        return self.context * self.tensor * self.pipeline

    @property
    def is_plain(self) -> bool:
        """Whether each rank has a whole model."""
        return self.data == self.num_ranks

    @property
    def settings(self) -> tuple[Layout, PipelineSettings]:
        """The same as settings of training, without the number of micro-batches."""
        return _make_settings(self)

    @property
    def axes(self) -> dict[str, int]:
        """Axes with more than one rank."""
        names = ("data", "sharded", "context", "tensor", "pipeline")
        return {name: getattr(self, name) for name in names if getattr(self, name) > 1}


@lru_cache(maxsize=4096)
def _make_settings(division: Division) -> tuple[Layout, PipelineSettings]:
    layout = Layout(
        data=division.data,
        sharded=division.sharded,
        zero_stage=cast("Literal[1, 2, 3]", division.zero_stage),
        context=division.context,
        tensor=division.tensor,
        pipeline=division.pipeline,
    )
    chunks = division.stages_per_rank
    return layout, PipelineSettings(order=division.order, stages_per_rank=chunks if layout.pipeline > 1 else None)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to train.

    Args:
        machines: Index of its machines among those on offer.
        division: Division of its ranks.
        num_micro_batches: Micro-batches of a worker's samples in a step.
        recompute: Activations that backward computes again.
        precision: Precision of the forward pass.
        offload: State that waits in the host's memory.
        bucket_bytes: Size of the buckets of gradients; None: the run's own.
        way: Rule and codec that change what is learnt; None: gradients are averaged in every step.
    """

    machines: int
    division: Division
    num_micro_batches: int
    recompute: Recompute
    precision: str
    offload: Offload = "none"
    bucket_bytes: int | None = None
    way: Way | None = None

    def list_overrides(self) -> dict[str, Any]:
        """Return the settings of a run that make it train so, by dotted path."""
        division = self.division
        pipes = division.pipeline > 1
        overrides: dict[str, Any] = {f"layout.{name}": getattr(division, name) for name in _AXES}
        overrides["num_micro_batches"] = 1 if pipes else self.num_micro_batches
        if division.sharded > 1:
            overrides["layout.zero_stage"] = division.zero_stage
        if pipes:
            overrides["pipeline.order"] = division.order
            overrides["pipeline.stages_per_rank"] = division.stages_per_rank
            overrides["pipeline.num_micro_batches"] = self.num_micro_batches
        overrides["memory.recompute"] = self.recompute
        overrides["memory.offload"] = self.offload
        overrides["precision"] = self.precision
        if self.bucket_bytes is not None:
            overrides["bucket_bytes"] = self.bucket_bytes
        if self.way is not None:
            overrides |= dict(self.way.settings)
        return overrides

    @property
    def steps_factor(self) -> float:
        """Steps to the same loss, to those of exact ways."""
        return 1.0 if self.way is None else self.way.steps_factor

    @property
    def plainness(self) -> tuple[int, ...]:
        """Sort key by which the plainer of two equal ways comes first."""
        division = self.division
        is_plain_order = division.order == "1f1b"
        return (
            0 if self.way is None else 1,
            len(division.axes),
            division.tensor * division.context * division.pipeline,
            ("none", "optimizer", "activations", "both").index(self.offload),
            ("none", "selective", "full").index(self.recompute),
            self.num_micro_batches,
            0 if is_plain_order else 1,
            division.sharded,
            0 if self.bucket_bytes is None else 1,
        )

    def describe(self) -> str:
        """Return it in words."""
        division = self.division
        axes = " x ".join(f"{axis} {size}" for axis, size in division.axes.items())
        parts = [f"{division.num_ranks} ranks: {axes}" if axes else "one rank"]
        if division.sharded > 1:
            parts.append(f"ZeRO-{division.zero_stage}")
        if division.pipeline > 1:
            chunks = f" of {division.stages_per_rank} stages a rank" if division.stages_per_rank > 1 else ""
            parts.append(f"{division.order}{chunks}")
        many = self.num_micro_batches
        parts.append(f"{many} micro-batch{'es' * (many > 1)}")
        if self.recompute != "none":
            parts.append(f"{self.recompute} recomputation")
        if self.offload != "none":
            parts.append(f"{_OFFLOADED[self.offload]} offloaded")
        if self.bucket_bytes is not None:
            parts.append(f"buckets of {self.bucket_bytes / 2**20:g} MiB")
        parts.append(self.precision)
        if self.way is not None:
            parts.append(self.way.name)
        return ", ".join(parts)


_AXES = ("data", "sharded", "context", "tensor", "pipeline")
