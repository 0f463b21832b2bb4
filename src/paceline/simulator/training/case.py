"""A training step whose every number is known: what a row says, and what is assumed where it is silent."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, TypeVar

from pydantic import ValidationError

from paceline.errors import PacelineError, SettingsError
from paceline.registry import explain
from paceline.simulator.training.contract import LayoutRow, PipelineRow, Row, SampleRow
from paceline.simulator.training.exchanges import USUAL, GradientExchange
from paceline.simulator.training.shapes import ModelShape
from paceline.topology import Cluster, Device, Paths, Precision, find_device


@dataclass(frozen=True)
class StepCase:
    """A training step whose every number is known or assumed. Sizes are those of `Row`.

    `offload` is that of a run's memory settings, and `exchange` that between replicas; rows have the usual ones.
    """

    row: Row
    model: ModelShape
    tokens: int
    image: tuple[int, ...]
    device: Device
    device_name: str
    cluster: Cluster
    paths: Paths
    data: int
    sharded: int
    zero_stage: int
    context: int
    tensor: int
    pipeline: int
    sequence_parallel: bool
    order: str
    stages_per_rank: int
    micro_batch: float
    global_batch: float
    precision: Precision
    attention: str
    recompute: str
    is_compiled: bool
    optimizer: str
    stack: str
    assumed: tuple[str, ...]
    offload: str = "none"
    exchange: GradientExchange = USUAL

    @property
    def offloads_activations(self) -> bool:
        """Whether activations wait in the host's memory."""
        return self.offload in ("activations", "both")

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the host's processors update parameters."""
        return self.offload in ("optimizer", "both")

    @property
    def num_workers(self) -> int:
        """Workers that see different samples."""
        return self.data * self.sharded

    @property
    def num_shards(self) -> int:
        """Ranks that share the state of a replica: FSDP divides it among context ranks too."""
        return self.sharded * (self.context if self.stack.startswith("fsdp") else 1)

    @property
    def samples_of_worker(self) -> float:
        """Samples of the worker with most of a step: the others wait for it."""
        return float(ceil(self.global_batch / self.num_workers - 1e-9))

    @property
    def num_micro_batches(self) -> float:
        """Micro-batches of that worker in one step; a last one that is smaller counts as its share."""
        return max(1.0, self.samples_of_worker / self.micro_batch)

    @property
    def samples(self) -> float:
        """Samples of a micro-batch: fewer than asked where the global batch has no more."""
        return min(self.micro_batch, self.samples_of_worker)

    @property
    def on_host(self) -> int:
        """Ranks of a full host."""
        return min(self.row.num_ranks, self.paths.devices_per_host)

    @property
    def num_hosts(self) -> int:
        """Hosts of the ranks."""
        return -(-self.row.num_ranks // self.paths.devices_per_host)


OPTIMIZERS = ("adamw", "adam", "adamw_8bit", "adafactor", "lamb", "lars", "sgd", "momentum", "function")
"""Optimizers that are priced; one of a function's has a state that nobody knows."""
T = TypeVar("T")


class _Assumptions:
    """Values of a row, with those that were assumed written down; a model may have settled some."""

    def __init__(self, fixed: Mapping[str, Any]) -> None:
        self.names: list[str] = []
        self._fixed = fixed

    def take(self, name: str, value: T | None, default: T) -> T:
        if name in self._fixed:
            settled: T = self._fixed[name]
            if value not in (None, settled):
                raise SettingsError(
                    f"{name} must be {settled!r}, with which the model was traced, but got {value!r}; leave it out, or "
                    "trace the model anew"
                )
            return settled
        if value is None:
            self.names.append(name)
            return default
        return value


_CLUSTERS = {
    "pascal": "switch", "volta": "dgx1", "ampere": "dgx_a100", "hopper": "dgx_h100", "blackwell": "dgx_b200",
    "tpu": "tpu_v3_pod", "cpu": "switch",
}  # fmt: skip


def make_case(row: Row) -> StepCase:
    """Return the case of a row.

    Raises:
        PacelineError: The row names something unknown, or its sizes do not fit together.
    """
    try:
        return _make_case(row)
    except ValidationError as error:
        raise SettingsError(explain(error)) from error


def _make_case(row: Row) -> StepCase:
    if row.refusal:
        raise SettingsError(row.refusal)
    model: ModelShape = ModelShape.model_validate(row.model)
    assume = _Assumptions(model.fixed)
    assume.names += model.uncertain
    for name in ("num_kv_heads", "num_heads", "feedforward", "is_gated", "is_tied", "positions", "vocabulary"):
        if name in type(model).model_fields and row.model.get(name) is None:
            assume.names.append(f"model.{name}")
    device, device_name, cluster = _find_hardware(row, assume)
    axes = _find_axes(row, assume)
    _check_heads(model, axes["tensor"])
    pipeline = row.pipeline or PipelineRow()
    order = assume.take("pipeline.order", pipeline.order, "1f1b") if axes["pipeline"] > 1 else "1f1b"
    chunks = assume.take("pipeline.stages_per_rank", pipeline.stages_per_rank, 1) if axes["pipeline"] > 1 else 1
    sample = row.sample or SampleRow()
    tokens = assume.take("sample.tokens", sample.tokens, 2048) if model.reads_tokens else 0
    image = tuple(assume.take("sample.image", sample.image, [3, 224, 224])) if not model.reads_tokens else ()
    workers = axes["data"] * axes["sharded"]
    least = 8 * axes["pipeline"] if axes["pipeline"] > 1 else 1
    batch = assume.take("global_batch", row.global_batch, (row.micro_batch or 1.0) * workers * least)
    if batch < workers:
        raise SettingsError(
            f"global_batch must be at least the number of workers, data x sharded = {workers}, but got {batch:g}; "
            "raise it, or take fewer"
        )
    guess = 1.0 if axes["pipeline"] > 1 else min(4.0 if model.reads_tokens else 64.0, max(1.0, batch / workers))
    if axes["pipeline"] > device_stages(model, chunks):
        raise SettingsError(
            f"pipeline x stages_per_rank must be at most the number of layers, but {axes['pipeline']} x {chunks} > "
            f"{model.num_blocks}; take fewer stages"
        )
    precision: Precision = assume.take("precision", row.precision, "bf16" if "bf16" in device.peak_flops else "fp16")
    used = device.find_precision(precision)
    if used != precision:
        assume.names.append(f"precision {used}, as the device lacks {precision}")
    if row.sync is not None and row.sync.get("name") != "every_step":
        raise SettingsError(
            f"sync must be every_step to be priced here, but got {row.sync.get('name')!r}; leave it out"
        )
    optimizer = assume.take("optimizer", row.optimizer, "adamw" if model.reads_tokens else "sgd")
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise SettingsError(f"optimizer must be one of {known}, but got {optimizer!r}; take one")
    if optimizer == "function":
        assume.names.append("optimizer function, priced as adamw")
    return StepCase(
        row=row,
        model=model,
        tokens=tokens,
        image=image,
        device=device,
        device_name=device_name,
        cluster=cluster,
        paths=cluster.paths,
        data=axes["data"],
        sharded=axes["sharded"],
        zero_stage=axes["zero_stage"],
        context=axes["context"],
        tensor=axes["tensor"],
        pipeline=axes["pipeline"],
        sequence_parallel=assume.take("sequence_parallel", row.sequence_parallel, False) and axes["tensor"] > 1
        if axes["tensor"] > 1
        else False,
        order=order,
        stages_per_rank=chunks,
        micro_batch=assume.take("micro_batch", row.micro_batch, guess),
        global_batch=batch,
        precision=precision,
        attention=assume.take("attention", row.attention, "eager") if model.reads_tokens else "eager",
        recompute=assume.take("recompute", row.recompute, "none"),
        is_compiled=assume.take("is_compiled", row.is_compiled, False),
        optimizer=optimizer,
        stack=row.stack or model.fixed.get("stack", ""),
        assumed=tuple(assume.names),
    )


def device_stages(model: ModelShape, chunks: int) -> int:
    """Return the most ranks that a pipeline of a model may have with `chunks` stages on each."""
    return max(1, model.num_blocks // chunks)


def _find_hardware(row: Row, assume: _Assumptions) -> tuple[Device, str, Cluster]:
    given = row.device
    device = Device.model_validate(given) if isinstance(given, dict) else find_device(given) if given else None
    if row.cluster is None:
        generation = device.generation if device else "ampere"
        assume.names.append("cluster")
        cluster = Cluster.model_validate(_CLUSTERS.get(generation, "switch"))
    else:
        cluster = Cluster.model_validate(row.cluster)
    if row.devices_per_host is not None and "devices_per_host" in type(cluster).model_fields:
        cluster = cluster.model_copy(update={"devices_per_host": row.devices_per_host})
    if device is None:
        assume.names.append("device")
        device = cluster.device_of_slowest(row.num_ranks) or find_device("a100_80gb")
    cluster = cluster.model_copy(update={"device": device})
    cluster.check_size(row.num_ranks)
    on_host = min(row.num_ranks, cluster.paths.devices_per_host)
    return device.divide(on_host), given if isinstance(given, str) else device.generation, cluster


def _check_heads(model: ModelShape, tensor: int) -> None:
    """Refuse what training refuses: tensor ranks that do not divide heads and matrices, where those are known."""
    for what, number in (model.divided or {}).items() if tensor > 1 else ():
        if number % tensor and getattr(model, what, number) is not None:
            raise SettingsError(
                f"{what} must be a multiple of layout.tensor, but {number} = {tensor} x {number // tensor} + "
                f"{number % tensor}; take another number of ranks"
            )


def _find_axes(row: Row, assume: _Assumptions) -> dict[str, int]:
    layout = row.layout or LayoutRow()
    axes = {
        axis: assume.take(f"layout.{axis}", getattr(layout, axis), 1)
        for axis in ("sharded", "context", "tensor", "pipeline")
    }
    others = prod(axes.values())
    axes["data"] = assume.take("layout.data", layout.data, max(1, row.num_ranks // others))
    if axes["data"] * others != row.num_ranks:
        product = " * ".join(f"{axis}({size})" for axis, size in axes.items() if size > 1) or "data(1)"
        raise SettingsError(
            f"the axes of a layout must multiply to num_ranks, but {product} = {axes['data'] * others} and "
            f"num_ranks={row.num_ranks}; change one"
        )
    stage = assume.take("layout.zero_stage", layout.zero_stage, 3) if axes["sharded"] > 1 else 3
    return {**axes, "zero_stage": stage}


def explain_refusal(error: PacelineError) -> str:
    """Return why a row cannot be priced, as one line."""
    return " ".join(str(error).split())
