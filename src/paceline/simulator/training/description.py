"""A training step as numbers: operators and exchanges of the slowest rank, before any of them has a time."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from paceline.simulator.training.case import StepCase
from paceline.simulator.training.exchanges import Axis, AxisGroup, Exchange
from paceline.simulator.training.operators import Workload, WorkSlice
from paceline.simulator.training.shapes import OWN_STACK, ModelShape

OPTIMIZER_BYTES = {
    "adamw": 30.0, "adam": 30.0, "adamw_8bit": 18.0, "adafactor": 14.0, "lamb": 54.0, "lars": 34.0, "sgd": 22.0,
    "momentum": 22.0, "function": 30.0,
}  # fmt: skip
"""Bytes that an update reads and writes for each parameter of a rank, in mixed precision."""
_COPY_BYTES = 8.0
"""Bytes that a copy of an fp32 gradient reads and writes."""
_UPDATE_BYTES = 12.0
"""Bytes of a parameter over the link for an update by the host: it and its gradient there, and it back, in fp32."""
_SAVED_BY_OPERATOR = 0.25
"""Share of a block that is kept where every other product is computed again."""


@dataclass(frozen=True)
class Description:
    """A step as numbers.

    Args:
        case: Case of it.
        workload: Operators of one micro-batch on one rank, of all layers.
        stage_blocks: Share of all blocks in the slowest stage.
        stage_heads: Whether that stage has the head: 0 or 1.
        other_blocks: Share of all blocks in the other stages.
        other_heads: Whether one of those has the head.
        fill: Times that the other stages' micro-batch is waited for: the bubble.
        launch_stretch: Times as often that starting their kernels is: few of them are of gradients of weights.
        stage_parameters: Parameters of a rank of the slowest stage, before the sharded axis divides them.
        exchanges: Exchanges of the rank.
        optimizer_bytes: Bytes that its optimizer moves.
        accumulate_bytes: Bytes that adding gradients moves in each micro-batch.
        coding_bytes: Bytes that codecs move in a step.
        sent_activations_bytes: Bytes of activations that wait in the host's memory, of each micro-batch.
        sent_update_bytes: Bytes between device and host for an update by the host.
        host_update_bytes: Bytes that the host moves in its own memory for that update.
    """

    case: StepCase
    workload: Workload
    stage_blocks: float
    stage_heads: float
    other_blocks: float
    other_heads: float
    fill: float
    launch_stretch: float
    stage_parameters: float
    exchanges: tuple[Exchange, ...]
    optimizer_bytes: float
    accumulate_bytes: float
    coding_bytes: float = 0.0
    sent_activations_bytes: float = 0.0
    sent_update_bytes: float = 0.0
    host_update_bytes: float = 0.0


def describe(case: StepCase) -> Description:
    """Return the numbers of a case."""
    workload = _count(case.model, _slice(case), case.image)
    blocks, heads = _find_slowest_stage(case)
    parameters = workload.block_parameters * blocks + _ends_parameters(workload, case, heads)
    owned = parameters / case.num_shards
    fill = _count_fill(case, splits_backward="zero_bubble" in case.order)
    per_parameter = OPTIMIZER_BYTES[case.optimizer]
    return Description(
        case=case,
        workload=workload,
        stage_blocks=blocks,
        stage_heads=heads,
        other_blocks=1.0 - blocks,
        other_heads=1.0 - heads,
        fill=fill,
        launch_stretch=_count_fill(case, splits_backward=False) / fill if fill else 1.0,
        stage_parameters=parameters,
        exchanges=tuple(_list_exchanges(case, workload, blocks, parameters)),
        optimizer_bytes=0.0 if case.offloads_optimizer else owned * per_parameter,
        coding_bytes=parameters * case.exchange.coding * _COPY_BYTES,
        sent_activations_bytes=find_kept(case, workload)[0] if case.offloads_activations else 0.0,
        sent_update_bytes=owned * _UPDATE_BYTES if case.offloads_optimizer else 0.0,
        host_update_bytes=owned * per_parameter if case.offloads_optimizer else 0.0,
        accumulate_bytes=parameters * 10.0 / (case.sharded if case.zero_stage >= 2 else 1),
    )


def find_kept(case: StepCase, workload: Workload) -> tuple[float, float]:
    """Return the bytes of all blocks that backward needs, and those of one that it computes again for a moment."""
    whole_block = workload.kept_bytes / case.model.num_blocks
    if case.recompute == "full":
        kept, block = workload.kept_inputs_bytes, whole_block
    elif case.recompute == "selective" and workload.kept_selective_bytes is not None:
        kept, block = workload.kept_selective_bytes + workload.kept_inputs_bytes, whole_block
    elif case.recompute == "selective" and case.attention == "fused":
        kept, block = workload.kept_bytes * _SAVED_BY_OPERATOR, whole_block
    elif case.recompute == "selective":
        kept, block = workload.kept_bytes - workload.kept_scores_bytes, whole_block
    else:
        kept, block = workload.kept_bytes, 0.0
    return kept * (0.9 if case.is_compiled and case.recompute != "full" else 1.0), block  # what is fused is kept once


def _count_fill(case: StepCase, *, splits_backward: bool) -> float:
    """Return how much of one micro-batch's time in the other stages a rank is idle, by the formula of its order.

    Fewer micro-batches than ranks leave gaps: a single one passes from rank to rank in every order, and what a split
    backward gains is that gradients of weights (a third of the work) are no part of that way.
    """
    others = case.pipeline - 1
    if not others:
        return 0.0
    missing = max(0.0, case.pipeline - case.num_micro_batches) / others
    chunks = case.stages_per_rank if "interleaved" in case.order else 1
    if splits_backward:
        return (1 + (2 * chunks - 1) * missing) / (3 * chunks)
    return (1 + (chunks - 1) * missing) / chunks


@lru_cache(maxsize=2048)
def _count(model: ModelShape, part: WorkSlice, image: tuple[int, ...]) -> Workload:
    """Return what a model does: the same for many layouts, so that it is counted once."""
    return model.count(part, image)


def _slice(case: StepCase) -> WorkSlice:
    element = 4.0 if case.precision in ("fp32", "tf32") else 2.0
    weight = 1.0 if case.precision == "fp8" and case.device.find_precision("fp8") == "fp8" else element
    full, selective = case.recompute == "full", case.recompute == "selective"
    own = selective and case.stack == OWN_STACK  # it keeps the results of all products
    by_operator = selective and case.attention == "fused" and not own
    return WorkSlice(
        samples=case.samples,
        tokens=case.tokens / case.context,
        sequence=float(case.tokens),
        tensor=case.tensor,
        is_split=case.sequence_parallel,
        element_bytes=element,
        weight_bytes=weight,
        is_fused=case.attention == "fused",
        # Fused attention keeps no scores: what is recomputed selectively there is every other product.
        recomputed=1.0 if full else 0.5 if by_operator else 0.0,
        recomputes_attention=full or (selective and not by_operator and not own),
        recomputed_bytes=1.0 if full or by_operator or own else 0.0,
        is_compiled=case.is_compiled,
    )


def _find_slowest_stage(case: StepCase) -> tuple[float, float]:
    """Return the share of all blocks in the slowest stage, and whether it has the head.

    Where blocks do not divide evenly but blocks, embedding and head together do, these count as blocks.
    """
    num_blocks, stages = case.model.num_blocks, case.pipeline
    if stages == 1:
        return 1.0, 1.0
    if num_blocks % stages and (num_blocks + 2) % stages == 0:
        middle, last = (num_blocks + 2) // stages, (num_blocks + 2) // stages - 1
    else:
        middle, last = ceil(num_blocks / stages), num_blocks // stages
    # The stage is the same with and without recomputation, so that this cannot make a step shorter.
    workload = _count(case.model, _slice(replace(case, recompute="none")), case.image)
    of_block = sum(f * c for f, c in zip(workload.blocks.flops, workload.blocks.counts, strict=True)) / num_blocks
    of_head = sum(f * c for f, c in zip(workload.head.flops, workload.head.counts, strict=True))
    if last * of_block + of_head > middle * of_block:
        return last / num_blocks, 1.0
    return middle / num_blocks, 0.0


def _ends_parameters(workload: Workload, case: StepCase, heads: float) -> float:
    """Return the parameters of embedding and head in the slowest stage; with stages, the last copies a tied one."""
    if case.pipeline == 1:
        return workload.embedding_parameters + workload.head_parameters
    tied = workload.tied_parameters
    if tied is None:
        tied = 0.0 if workload.head_parameters else workload.embedding_parameters
    return heads * (workload.head_parameters + tied)


def _list_exchanges(case: StepCase, workload: Workload, blocks: float, parameters: float) -> list[Exchange]:
    element = 4.0 if case.precision in ("fp32", "tf32") else 2.0
    boundary = workload.boundary_elements * element
    found = []
    if case.tensor > 1:
        group = AxisGroup.of_axis(case.tensor, 1, case.paths)
        again = (
            1.5
            if case.recompute == "full" or (case.recompute == "selective" and case.stack == OWN_STACK)
            else 1.25
            if case.recompute == "selective" and case.attention == "fused"
            else 1.0
        )
        found.append(group.reduce(Axis.TENSOR, boundary, workload.block_reductions * again))
    if case.context > 1:
        group = AxisGroup.of_axis(case.context, case.tensor, case.paths)
        again = 2.0 if case.recompute == "full" else 1.0
        found.append(group.gather(Axis.CONTEXT, workload.context_elements * element * case.context, again + 2.0))
    if case.pipeline > 1:
        inner = case.tensor * case.context * case.sharded * case.data
        group = AxisGroup.of_axis(case.pipeline, inner, case.paths)
        chunks = case.stages_per_rank if "interleaved" in case.order else 1
        split = case.tensor if case.sequence_parallel or case.stack.startswith("megatron") else 1
        found.append(group.send(Axis.PIPELINE, boundary / split, 2.0 * chunks))
    return found + _list_gradients(case, parameters, element)


def _list_gradients(case: StepCase, parameters: float, element: float) -> list[Exchange]:
    """Return the exchanges of gradients and parameters: over sharded and context ranks, then over replicas."""
    inner = case.tensor
    shard = AxisGroup.of_axis(case.sharded * case.context, inner, case.paths)
    replicas = AxisGroup.of_axis(case.data, inner * case.context * case.sharded, case.paths)
    # Megatron adds gradients of bf16 in fp32, and sends them so.
    summed = 4.0 if case.stack.startswith("megatron") and case.precision == "bf16" else element
    num_bytes, found = parameters * element, []
    if case.num_shards > 1 and case.zero_stage == 3:
        found.append(shard.gather(Axis.SHARD, num_bytes, 3.0))
    elif case.num_shards > 1 and case.zero_stage == 2:
        found.append(shard.gather(Axis.SHARD, num_bytes, 2.0))
    elif case.num_shards > 1:
        found.append(shard.gather(Axis.DATA, num_bytes + parameters * summed))
    elif case.context > 1:
        found.append(shard.reduce(Axis.DATA, parameters * summed))
    if case.data > 1:
        found.append(case.exchange.apply(replicas.reduce(Axis.DATA, parameters * summed / case.sharded)))
    return found
