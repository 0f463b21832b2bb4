"""Memory of the fullest rank, in closed form: state, what backward needs, and what a step needs for a moment."""

from dataclasses import dataclass

from paceline.simulator.training.case import StepCase
from paceline.simulator.training.description import Description, find_kept
from paceline.simulator.training.operators import Workload

OPTIMIZER_STATE_BYTES = {
    "adamw": 8.0, "adam": 8.0, "adamw_8bit": 2.0, "adafactor": 0.0, "lamb": 8.0, "lars": 4.0, "sgd": 4.0,
    "momentum": 4.0, "function": 8.0,
}  # fmt: skip
"""Bytes of an optimizer's state for each parameter; SGD with momentum, and Adafactor has next to none."""
ALLOCATOR = 1.06
"""Memory that an allocator takes, over what is asked of it: 4-8 % (rounding, fragments)."""
RUNTIME_BYTES = 2.2e9
"""Memory of the device's runtime, libraries and communication."""
LOG_SPREAD = 0.10
"""Standard deviation of the logarithm of measured memory around this, over the shipped rows of both families."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest rank.

    Args:
        state_bytes: Parameters, gradients and optimizer state.
        activation_bytes: Activations that all micro-batches in flight keep for backward.
        working_bytes: Memory that one block or the head needs for a moment, with parameters gathered for it.
        total_bytes: All of it, with allocator and runtime.
        host_bytes: Memory of the host for what waits there.
    """

    state_bytes: float
    activation_bytes: float
    working_bytes: float
    total_bytes: float
    host_bytes: float = 0.0


def estimate_memory(description: Description) -> MemoryEstimate:
    """Return the memory of the fullest rank: that of the first stage, or of the last, which has the head."""
    case, workload = description.case, description.workload
    stages = case.pipeline
    per_stage = workload.block_parameters / stages
    # Both ends hold a copy of a tied embedding; one stage alone holds both.
    ends = workload.embedding_parameters + (workload.head_parameters if stages == 1 else 0.0)
    parameters = per_stage + ends
    state = parameters * _state_bytes(case)
    kept, block = find_kept(case, workload)
    # With few layers a stage, keeping all takes no more than computing again.
    activations = min(
        _activation_bytes(case, workload, kept, block), _activation_bytes(case, workload, workload.kept_bytes, 0.0)
    )
    gathered = 2 * workload.block_parameters / case.model.num_blocks + ends if case.num_shards > 1 else 0.0
    working = gathered * (2.0 if case.zero_stage == 3 else 0.0)
    waiting = 0.0
    if case.offloads_activations:
        # Two blocks are on the device: that which backward is at, and the one that comes back before it is needed.
        staying = min(2 * max(kept / case.model.num_blocks, block) + workload.head_bytes, activations)
        activations, waiting = staying, activations - staying
    if case.offloads_optimizer:
        waiting += parameters * (8.0 + OPTIMIZER_STATE_BYTES[case.optimizer])  # copies of parameters and gradients too
    total = (state + activations + working) * ALLOCATOR + RUNTIME_BYTES
    return MemoryEstimate(state, activations, working, total, waiting)


def _activation_bytes(case: StepCase, workload: Workload, kept: float, block: float) -> float:
    """Return what is kept for backward, with what one block or the head needs for a moment."""
    stages = case.pipeline
    # A stage holds its input and output beside what its blocks keep.
    held = kept / stages + (2 * workload.kept_inputs_bytes / case.model.num_blocks if stages > 1 else 0.0)
    head = workload.head_bytes if stages == 1 else 0.0
    return max(held * _count_in_flight(case) + head, held + workload.head_bytes) + block


def _count_in_flight(case: StepCase) -> float:
    """Return how many micro-batches the first stage keeps at once."""
    if case.order == "gpipe":
        return case.num_micro_batches
    chunks = case.stages_per_rank if "interleaved" in case.order else 1
    most = case.pipeline * (1 + (case.pipeline - 1) / (case.pipeline * chunks) if chunks > 1 else 1.0)
    return min(case.num_micro_batches, most)


def _state_bytes(case: StepCase) -> float:
    """Return the bytes of state for each parameter of a rank's stage and slice."""
    optimizer = 0.0 if case.offloads_optimizer else OPTIMIZER_STATE_BYTES[case.optimizer]
    exchange = case.exchange.state_bytes
    shards = case.num_shards
    if case.precision in ("fp32", "tf32"):
        parameter, gradient, master = 4.0, 4.0, 0.0
    else:
        parameter, gradient, master = 2.0, 2.0, 4.0
    if shards > 1 and case.zero_stage == 3:
        return (max(parameter, 4.0) + 4.0 + optimizer + exchange) / shards
    if shards > 1 and case.zero_stage == 2:
        return parameter + exchange + (gradient + master + optimizer) / shards
    return parameter + gradient + exchange + (master + optimizer) / shards
