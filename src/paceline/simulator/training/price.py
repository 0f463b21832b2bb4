"""Seconds of many steps at once, from their numbers and the parameters."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from paceline.simulator.training.batch import StepBatch
from paceline.simulator.training.exchanges import Axis
from paceline.simulator.training.operators import Kind
from paceline.simulator.training.parameters import GENERATIONS, INDEX, STACKS
from paceline.topology.cluster import Floats, Integers

TERMS = (
    "matrix", "attention", "pointwise", "loss", "launch", "tensor", "context", "pipeline", "bubble", "sharded", "data",
    "slowdown", "optimizer", "coding", "offload", "straggler",
)  # fmt: skip
"""Parts of a step's time: they add up to it."""
_UNMEASURED = {"coding": 0.4, "offload": 0.3}
"""Standard deviation of the logarithm of terms that no shipped row has."""
_CLASSES = {
    "matrix": ((Kind.MATRIX, Kind.CONVOLUTION), "case_matrix"),
    "attention": ((Kind.BATCHED, Kind.FUSED), "case_attention"),
    "pointwise": ((Kind.POINTWISE,), "case_pointwise"),
    "loss": ((Kind.LOSS,), "case_pointwise"),
}
"""Classes of operators of each term of computing, and the case's own factor on it."""


def price(batch: StepBatch, logs: Floats) -> Floats:
    """Return the seconds of each term of each step, shape (steps, terms).

    Args:
        batch: Numbers of the steps.
        logs: Logarithms of the parameters, in the order of `INDEX`.
    """
    return _Pricing(batch, logs).price()


def find_unmeasured_spread(terms: Floats) -> Floats:
    """Return the standard deviation of the logarithm of steps, shape (steps, terms), by what no shipped row has."""
    share = terms / terms.sum(axis=1)[:, None]
    squares = sum(((share[:, TERMS.index(name)] * spread) ** 2 for name, spread in _UNMEASURED.items()), np.zeros(1))
    return np.asarray(np.sqrt(squares))


def roofline_s(batch: StepBatch) -> Floats:
    """Return the seconds that no step can be below: flops of its slowest stage at the device's peak."""
    flops_s = _sum_by(batch.op_step, batch.op_flops * batch.op_stage / _peak(batch), batch.num_steps)
    return flops_s * batch.columns["micro_batches"]


class _Pricing:
    """Parameters applied to steps."""

    def __init__(self, batch: StepBatch, logs: Floats) -> None:
        self.batch, self.column = batch, batch.columns
        self.values = np.exp(logs)

    def price(self) -> Floats:
        """Return the terms: micro-batches of the slowest stage, the wait for the others, and what follows them."""
        column, micro = self.column, self.column["micro_batches"]
        operators_s = self._operator_times()
        stage = self._sum_classes(operators_s * self.batch.op_stage)
        other = self._sum_classes(operators_s * self.batch.op_other)
        stage["pointwise"] = stage["pointwise"] + column["accumulate"] / self.bandwidth * (micro > 1)
        computing = sum(stage.values(), np.zeros(self.batch.num_steps))
        computing_of_others = sum(other.values(), np.zeros(self.batch.num_steps))
        share, share_of_others = column["stage_blocks"], (1 - column["stage_blocks"]) * column["launch_stretch"]
        launch, idle = self._launch_times(share, computing)
        launch_of_others, idle_of_others = self._launch_times(share_of_others, computing_of_others)
        busy = computing + launch  # what runs beside an exchange has this long
        # Time in which kernels are started hides exchanges too: it takes the place of computing that is faster.
        tensor_stage, hidden_tensor = self._tensor_times(share, stage["matrix"] + idle)
        tensor_other, _ = self._tensor_times(1 - share, other["matrix"] + idle_of_others)
        context = self._sum_exchanges(Axis.CONTEXT) * self.of("case_network") * share
        # A tenth of a ring's rounds is waited for even where attention takes longer.
        exposed_context = np.maximum(context * 0.1, context - stage["attention"] - idle)
        # What one exchange hides behind, another does not: else faster computing would uncover more than it saves.
        hidden = hidden_tensor + context - exposed_context
        shard, exposed_shard = self._hide(Axis.SHARD, np.maximum(0.0, busy - hidden), "exposed_shard")
        hidden = hidden + shard - exposed_shard
        free = np.maximum(0.0, busy - hidden) * column["hides_data"]
        steps = column["hidden_steps"]
        free = np.where(steps < 0, free, np.maximum(0.0, busy - hidden) * micro * steps)
        data, exposed_data = self._hide(Axis.DATA, free, "exposed_data", column["data_parts"])
        hidden = hidden * micro + data - exposed_data
        send = self._sum_exchanges(Axis.PIPELINE) * self.of("case_network")
        terms = {
            **{name: seconds * micro for name, seconds in stage.items()},
            "launch": launch * micro,
            "tensor": tensor_stage * micro,
            "context": exposed_context * micro,
            "pipeline": send * (micro + column["stages"] - 1) * (column["stages"] > 1),
            "bubble": (computing_of_others + launch_of_others + tensor_other) * column["fill"],
            "sharded": exposed_shard * micro,
            "data": exposed_data,
            "slowdown": hidden * self.of("slowdown"),
            "optimizer": column["optimizer"] * self.of("update") / self.bandwidth,
            "coding": column["coding"] / self.bandwidth,
            "offload": self._offload_times(busy),
        }
        work = sum(terms.values(), np.zeros(self.batch.num_steps))
        terms["straggler"] = work * self.of("straggler") * np.sqrt(2 * np.log(column["num_ranks"]))
        factor = self.by("stack", STACKS, "stack") * self.of("case")
        return np.stack([terms[name] for name in TERMS], axis=1) * factor[:, None]

    def of(self, name: str) -> float:
        """Return a parameter."""
        return float(self.values[INDEX[name]])

    def by(self, prefix: str, names: Sequence[str], column: str) -> Floats:
        """Return the parameter of each step's choice; 1 where no parameter is of it."""
        known = np.array([self.of(f"{prefix}_{name}") for name in names] + [1.0])
        return known[self.column[column].astype(np.int64)]

    @cached_property
    def bandwidth(self) -> Floats:
        """Bytes that each step's device moves per second, never more than its specification says."""
        share = self.of("memory") * self.by("memory", GENERATIONS, "generation")
        return self.column["memory"] * np.minimum(1.0, share)

    def _launch_times(self, blocks: Floats, computing: Floats) -> tuple[Floats, Floats]:
        """Return what kernels add to computing, and how much of it is waiting for them to be started."""
        kernels = self.column["kernels"] * blocks
        idle = np.maximum(0.0, kernels * self.of("launch") - computing)
        return kernels * self.of("kernel") + idle, idle

    def _sum_classes(self, seconds: Floats) -> dict[str, Floats]:
        found = {}
        for name, (kinds, case) in _CLASSES.items():
            chosen = np.isin(self.batch.op_kind, kinds)
            summed = _sum_by(self.batch.op_step[chosen], seconds[chosen], self.batch.num_steps)
            found[name] = summed * self.of(case)
        return found

    @cached_property
    def _exchange_times(self) -> Floats:
        batch, column = self.batch, self.column
        latency_s = self.of("latency") * batch.ex_messages * (batch.ex_local + batch.ex_network > 0)
        local_s = batch.ex_local / (column["local"] * self.of("local"))[batch.ex_step]
        network_s = batch.ex_network / (column["network"] * min(1.0, self.of("network")))[batch.ex_step]
        return np.asarray((local_s + network_s + latency_s) * batch.ex_count)

    def _sum_exchanges(self, axis: Axis) -> Floats:
        chosen = self.batch.ex_axis == axis
        return _sum_by(self.batch.ex_step[chosen], self._exchange_times[chosen], self.batch.num_steps)

    def _tensor_times(self, blocks: Floats, matrix: Floats) -> tuple[Floats, Floats]:
        """Return the exchanges inside a share of all layers in a micro-batch that are waited for, and hidden ones."""
        tensor = self._sum_exchanges(Axis.TENSOR) * self.of("case_tensor") * blocks
        can_hide = max(0.0, 1 - self.of("exposed_tensor")) * self.column["hides_tensor"]
        hidden = np.minimum(tensor, matrix) * can_hide
        return tensor - hidden, hidden

    def _offload_times(self, busy: Floats) -> Floats:
        """Return the wait for the host: activations travel beside a third (forward), then the rest of computing."""
        column = self.column
        sent_s = column["sent_activations"] / column["host_link"]
        waits_s = np.maximum(0.0, sent_s - busy / 3) + np.maximum(0.0, sent_s - busy * 2 / 3)
        update_s = column["sent_update"] / column["host_link"] + column["host_update"] / column["host_memory"]
        return np.asarray(waits_s * column["micro_batches"] + update_s)

    def _hide(self, axis: Axis, computing: Floats, exposed: str, parts: Floats | float = 1.0) -> tuple[Floats, Floats]:
        """Return an exchange and the part that is waited for: its first block's, or what outlasts computing."""
        whole = self._sum_exchanges(axis) * self.of("case_network")
        first = whole / np.maximum(self.column["num_blocks"] * parts, 1.0)
        return whole, np.maximum(first, whole - computing * max(0.0, 1 - self.of(exposed)))

    def _operator_times(self) -> Floats:
        """Return the seconds of each operator: the longer of computing and of moving bytes."""
        batch, column, kinds = self.batch, self.column, self.batch.op_kind
        narrow = np.where(column["is_fp8"] > 0, self.of("fp8"), 1.0)
        wide = np.where(column["is_fp32"] > 0, self.of("fp32"), np.where(column["is_tf32"] > 0, self.of("tf32"), 1.0))
        matrix = self.by("matrix", GENERATIONS, "generation") * wide
        newest = np.where(column["has_newest"] > 0, self.of("fused_newest"), 1.0)
        # What fills the pipelines of a faster precision is a longer inner length.
        depth = self.of("depth") * (column["peak_matrix"] / column["peak_widest"])[batch.op_step]
        shape = batch.op_fill * batch.op_depth / (batch.op_depth + depth)
        head = batch.op_depth / (batch.op_depth + _HEAD_DEPTH)
        share = np.ones(len(kinds))
        for kind, name, factor, form in (
            (Kind.MATRIX, "matrix", narrow * matrix, shape),
            (Kind.CONVOLUTION, "convolution", matrix, shape),
            (Kind.BATCHED, "batched", matrix, np.ones_like(shape)),
            (Kind.FUSED, "fused", self.by("fused", GENERATIONS, "generation") * newest, head),
        ):
            chosen = kinds == kind
            share[chosen] = self.of(name) * factor[batch.op_step[chosen]] * form[chosen]
        share = np.minimum(share, 1.0) * np.where(batch.op_aligned > 0, 1.0, self.of("misaligned"))
        flops_s = batch.op_flops / (_peak(batch) * share)
        return np.asarray(np.maximum(flops_s, batch.op_bytes * self._byte_factors() / self.bandwidth[batch.op_step]))

    def _byte_factors(self) -> Floats:
        """Return how many times its counted bytes an operator moves."""
        column, kinds = self.column, self.batch.op_kind
        eager = np.where(column["is_fusing"] > 0, 1.0, self.of("eager"))
        eager = eager * np.where(column["fuses_norm"] > 0, self.of("fused_norm"), 1.0)
        factor = np.where(kinds == Kind.LOSS, self.of("loss"), 1.0)
        return np.where((kinds == Kind.POINTWISE) | (kinds == Kind.LOSS), factor * eager[self.batch.op_step], factor)


_HEAD_DEPTH = 32.0
"""Elements of a head at which fused attention has half its best speed."""


def _peak(batch: StepBatch) -> Floats:
    """Return the peak flop/s of each operator."""
    step = batch.op_step
    return np.where(batch.op_kind == Kind.MATRIX, batch.columns["peak_matrix"][step], batch.columns["peak"][step])


def _sum_by(steps: Integers, seconds: Floats, num_steps: int) -> Floats:
    return np.bincount(steps, seconds, minlength=num_steps).astype(np.float64)
