"""Numbers of many steps side by side, as arrays: what prices them all at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.simulator.training.description import Description
from paceline.simulator.training.operators import Kind
from paceline.simulator.training.parameters import GENERATIONS, STACKS
from paceline.topology import Precision
from paceline.topology.cluster import Floats, Integers

_TILES = ((256.0, 128.0, 1.0), (128.0, 128.0, 0.93), (128.0, 64.0, 0.78), (64.0, 64.0, 0.62))
"""Rows and columns of a tile of a matrix product, and the speed of computing it."""
_LEAST_DEPTH = 512.0
"""Depth below which a tile is not divided among cores."""


@dataclass(frozen=True)
class StepBatch:
    """Numbers of many steps: one entry for each operator, exchange or step."""

    op_step: Integers
    op_kind: Integers
    op_flops: Floats
    op_bytes: Floats
    op_depth: Floats
    op_aligned: Floats
    op_fill: Floats
    """Share of the tiles' work that is useful, in the last wave over the device's cores too."""
    op_stage: Floats
    """Executions in the slowest stage for each micro-batch."""
    op_other: Floats
    """Executions in the other stages together."""
    ex_step: Integers
    ex_axis: Integers
    ex_local: Floats
    ex_network: Floats
    ex_messages: Floats
    ex_count: Floats
    columns: dict[str, Floats]
    """Numbers of each step, by name."""

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.columns["peak"])


def make_batch(descriptions: Sequence[Description]) -> StepBatch:
    """Return the numbers of all descriptions as arrays."""
    parts = [_columns_of_operators(description) for description in descriptions]
    ops = {name: np.concatenate([part[name] for part in parts]) if parts else np.zeros(0) for name in _OP_COLUMNS}
    steps = np.repeat(np.arange(len(parts)), [len(part["kind"]) for part in parts])
    exchanges = [(number, e) for number, d in enumerate(descriptions) for e in d.exchanges]
    numbers = np.array(
        [(n, e.axis, e.local_bytes, e.network_bytes, e.num_messages, e.count) for n, e in exchanges]
    ).reshape(-1, 6)
    kinds = ops["kind"].astype(np.int64)
    columns = {name: np.array([_COLUMNS[name](d) for d in descriptions], dtype=np.float64) for name in _COLUMNS}
    by_eight = np.where((ops["columns"] % 8 == 0) & (ops["depths"] % 8 == 0), 1.0, 0.0)
    is_narrow = columns["is_fp32"][steps] + columns["is_tf32"][steps] == 0
    return StepBatch(
        op_step=steps,
        op_kind=kinds,
        op_flops=ops["flops"],
        op_bytes=ops["bytes"],
        op_depth=ops["depths"],
        op_aligned=np.where((kinds == Kind.BATCHED) & is_narrow & (columns["is_host"][steps] == 0), by_eight, 1.0),
        op_fill=_fill(ops["rows"], ops["columns"], ops["depths"], ops["batches"], columns["cores"][steps]),
        op_stage=ops["stage"],
        op_other=ops["other"],
        ex_step=numbers[:, 0].astype(np.int64),
        ex_axis=numbers[:, 1].astype(np.int64),
        ex_local=numbers[:, 2],
        ex_network=numbers[:, 3],
        ex_messages=numbers[:, 4],
        ex_count=numbers[:, 5],
        columns=columns,
    )


_OP_COLUMNS = ("kind", "flops", "bytes", "rows", "columns", "depths", "batches", "stage", "other")
_COLUMNS: dict[str, Callable[[Description], float]] = {
    "peak": lambda d: d.case.device.peak_flops[_matrix_precision(d, "bf16")] * d.case.device.clock_share,
    "peak_matrix": lambda d: (
        d.case.device.peak_flops[_matrix_precision(d, d.case.precision)] * d.case.device.clock_share
    ),
    "peak_widest": lambda d: max(d.case.device.peak_flops.values()) * d.case.device.clock_share,
    "memory": lambda d: d.case.device.memory_speed,
    "cores": lambda d: d.case.device.num_cores,
    "is_host": lambda d: d.case.device.is_host,
    "is_fp8": lambda d: _matrix_precision(d, d.case.precision) == "fp8",
    "is_fp32": lambda d: _matrix_precision(d, d.case.precision) == "fp32",
    "is_tf32": lambda d: _matrix_precision(d, d.case.precision) == "tf32",
    "hides_tensor": lambda d: d.case.sequence_parallel and d.case.attention == "fused",
    "hides_data": lambda d: not d.case.stack.startswith("megatron") or d.case.attention == "fused",
    "is_fusing": lambda d: (
        d.workload.moves_all or d.case.is_compiled or not d.case.model.reads_tokens or _is_modern_megatron(d)
    ),
    "has_newest": lambda d: d.case.device.generation in ("hopper", "blackwell") and _is_modern_megatron(d),
    "fuses_norm": lambda d: d.case.stack == "mlperf",
    "generation": lambda d: GENERATIONS.index(g) if (g := d.case.device.generation) in GENERATIONS else -1,
    "stack": lambda d: STACKS.index(d.case.stack) if d.case.stack in STACKS else -1,
    "local": lambda d: d.case.paths.local_bytes_per_s / (d.case.row.num_ranks if d.case.paths.is_bus else 1),
    "network": lambda d: d.case.paths.network_bytes_per_s,
    "local_latency": lambda d: d.case.paths.local_latency_s,
    "network_latency": lambda d: d.case.paths.network_latency_s,
    "num_ranks": lambda d: d.case.row.num_ranks,
    "micro_batches": lambda d: d.case.num_micro_batches,
    "fill": lambda d: d.fill,
    "launch_stretch": lambda d: d.launch_stretch,
    "stages": lambda d: d.case.pipeline,
    "stage_blocks": lambda d: d.stage_blocks,
    "num_blocks": lambda d: d.case.model.num_blocks * d.stage_blocks,
    "kernels": lambda d: d.workload.kernels * (0.4 if d.case.is_compiled else 1.0),
    "optimizer": lambda d: d.optimizer_bytes,
    "accumulate": lambda d: d.accumulate_bytes,
    "coding": lambda d: d.coding_bytes,
    "hidden_steps": lambda d: -1.0 if d.case.exchange.hidden_steps is None else d.case.exchange.hidden_steps,
    "data_parts": lambda d: d.case.exchange.parts,
    "sent_activations": lambda d: d.sent_activations_bytes,
    "sent_update": lambda d: d.sent_update_bytes,
    "host_update": lambda d: d.host_update_bytes,
    "host_link": lambda d: d.case.cluster.host.link_speed,
    "host_memory": lambda d: (
        d.case.cluster.host.memory_speed / min(d.case.row.num_ranks, d.case.paths.devices_per_host)
    ),
}


def _is_modern_megatron(description: Description) -> bool:
    """Return whether its software is Megatron with the fused kernels that came with fused attention."""
    return description.case.stack == "megatron" and description.case.attention == "fused"


def _matrix_precision(description: Description, precision: Precision) -> Precision:
    """Return the precision of a product: `precision`, but never narrower than the row's own."""
    own = description.case.precision
    wanted = own if precision == own or own != "fp8" else precision
    return description.case.device.find_precision(wanted)


def _columns_of_operators(description: Description) -> dict[str, Floats]:
    blocks, head = description.workload.blocks, description.workload.head

    def join(name: str) -> Floats:
        return np.array(getattr(blocks, name) + getattr(head, name), dtype=np.float64)

    counts, num_blocks, num_head = join("counts"), len(blocks.kinds), len(head.kinds)
    stage = np.repeat([description.stage_blocks, description.stage_heads], [num_blocks, num_head])
    other = np.repeat([description.other_blocks, description.other_heads], [num_blocks, num_head])
    return {
        "kind": join("kinds"),
        "flops": join("flops"),
        "bytes": join("num_bytes"),
        "rows": join("rows"),
        "columns": join("columns"),
        "depths": join("depths"),
        "batches": join("batches"),
        "stage": counts * stage,
        "other": counts * other,
    }


def _fill(rows: Floats, columns: Floats, depths: Floats, batches: Floats, cores: Floats) -> Floats:
    """Return the useful share of the best tiling: tiles at the edges and the last wave over the cores are not full.

    Where tiles are fewer than cores, a tile's depth is divided among cores, which costs a tenth more.
    """
    ideal = rows * columns * depths * batches / cores
    best = np.zeros(len(rows))
    for tile_rows, tile_columns, speed in _TILES:
        tiles = np.ceil(rows / tile_rows) * np.ceil(columns / tile_columns) * batches
        waves = np.ceil(tiles / cores) * depths
        divided = 1.1 * np.maximum(tiles / cores * depths, np.minimum(depths, _LEAST_DEPTH))
        best = np.maximum(best, speed * ideal / (np.minimum(waves, divided) * tile_rows * tile_columns))
    return best
