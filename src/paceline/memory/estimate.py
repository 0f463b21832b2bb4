"""Memory that each rank needs for a step, estimated before anything is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Size, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.compression import AutoCodec
from paceline.compression.codec import AllReduce, AllToAll, Codec, CodecContext
from paceline.memory.absent_group import AbsentGroup
from paceline.memory.recompute import Choice
from paceline.memory.rehearsal import StepDescription, UnknownValues, rehearse
from paceline.memory.tracker import Category, StorageTracker
from paceline.sync import EveryStep, Rule
from paceline.sync.periodic import PeriodicRule
from paceline.sync.synchroniser import LocalStep, WorkerContext
from paceline.topology.layout import Layout

_LARGEST_PROBE = 1 << 16
"""Elements of a block that codecs are tried on; the state of larger ones is in proportion."""
_STEPS_TRIED = 4096


@dataclass(frozen=True)
class Estimate:
    """Bytes of tensors of one rank at the peak."""

    bytes_of: Mapping[Category, int]
    """Bytes on the device, by purpose."""
    host_bytes: int = 0
    """Bytes offloaded to CPU memory, if the device is a GPU."""
    division: str = ""
    """Direction in which it may be off, if a whole model's bytes were divided, since ranks could not be rehearsed."""
    most_bytes: int = 0
    """Bytes on the device if the experts of one rank are used as much as they can be; 0 without an expert axis."""

    @property
    def peak_bytes(self) -> int:
        """Bytes of all purposes on the device."""
        return sum(self.bytes_of.values())


def estimate_step(
    step: StepDescription, choices: Mapping[str, Choice], rule: Rule, num_workers: int, num_steps: int
) -> Estimate:
    """Return the memory that a step needs on a worker with a whole model.

    The step is rehearsed on tensors without contents: parameters, gradients in their buckets, optimizer state, and the
    tensors of forward and backward, each until it is freed. The state of the synchronisation rule and its codec is
    added. The result is what a tracker of tensors counts in the real step. It leaves out what such a tracker cannot
    see: Python and its libraries, workspaces of kernels, batches read ahead, a checkpoint being written.

    Args:
        step: The step.
        choices: Recomputation of its blocks, by name.
        rule: Synchronisation rule of the workers.
        num_workers: Number of workers.
        num_steps: Number of steps of the run; the first exchange after them is counted.
    """
    rehearsed = rehearse(step, choices)
    bytes_of = dict(rehearsed.peak)
    if num_workers > 1:
        bytes_of["communication"] += _count_rule(rule, step, num_workers, num_steps)
        shapes = {name: tuple(p.shape) for name, p in _outline(step).named_parameters() if p.requires_grad}
        bytes_of["communication"] += count_codec(rule, shapes, num_workers)
    return Estimate(bytes_of, sum(rehearsed.host.values()))


def divide(whole: Estimate, layout: Layout, num_micro_batches: int = 1, expert_share: float = 0.0) -> Estimate:
    """Return the memory of a rank of a layout, roughly, from that of a worker with a whole model.

    For models whose ranks cannot be rehearsed. Computed from the division alone: tensor axis and pipeline divide
    parameters, gradients, optimizer state and activations; the context axis activations; of the sharded axis stage 1
    divides optimizer state, stage 2 gradients too unless micro-batches add them up in full, stage 3 parameters too. A
    stage of a pipeline counts as if it held the activations of all its micro-batches. Tensors that are whole on every
    rank (norms, embeddings of another stage), and a block's parameters gathered from the sharded axis, are left out:
    the result may be a third too low.

    Args:
        whole: Memory of a worker with a whole model.
        layout: Layout of the ranks.
        num_micro_batches: Micro-batches over which the run accumulates gradients; a pipeline's own are apart.
        expert_share: Part of the parameters that are experts', which the expert axis divides, with their gradients and
            their optimizer state.
    """
    model = layout.tensor * layout.pipeline
    accumulates = num_micro_batches > 1 or layout.pipeline > 1
    sharded: dict[Category, int] = {
        "optimizer": layout.sharded,
        "gradients": layout.sharded if layout.zero_stage >= 2 and not accumulates else 1,
        "parameters": layout.sharded if layout.zero_stage == 3 else 1,
    }
    bytes_of = {
        category: -(-num_bytes // (model * sharded.get(category, 1))) for category, num_bytes in whole.bytes_of.items()
    }
    held = 1 - expert_share + expert_share / layout.expert
    of_parameters: tuple[Category, ...] = ("parameters", "gradients", "optimizer")
    for category in of_parameters:
        bytes_of[category] = ceil(bytes_of[category] * held)
    for category in ("activations", "temporary"):
        bytes_of[category] = ceil(whole.bytes_of[category] / (model * layout.context))
    return Estimate(bytes_of, -(-whole.host_bytes // (model * layout.sharded)), division=_describe_division(layout))


def _describe_division(layout: Layout) -> str:
    """Return in which direction a divided estimate is off."""
    low = (layout.tensor > 1 or layout.context > 1, "too low by a third, for what every rank has whole, such as logits")
    high = (layout.pipeline > 1, "too high by a multiple, where a pipeline has many micro-batches")
    uneven = (layout.expert > 1, "too low where experts are used unevenly")
    return "it may be " + ", or ".join([text for is_so, text in (low, high, uneven) if is_so] or ["off either way"])


def _count_rule(rule: Rule, step: StepDescription, num_workers: int, num_steps: int) -> int:
    """Return the bytes that the rule's state needs in a sync step, beside summed gradients."""
    group = AbsentGroup(0, num_workers, step.device)
    with FakeTensorMode(allow_non_fake_inputs=True), UnknownValues():  # type: ignore[no-untyped-call]
        with step.device:
            module, optimizer = step.build({})
        return count_synchroniser(rule, WorkerContext(module, optimizer, group, world=group), num_steps)


def count_synchroniser(rule: Rule, context: WorkerContext, num_steps: int) -> int:
    """Return the bytes that the rule's state needs in a sync step; called in a rehearsal.

    Args:
        rule: Synchronisation rule of the workers.
        context: Objects that the rule works on, without contents, in a group that does not exist.
        num_steps: Number of steps of the run; the first exchange after them is counted.
    """
    module, group = context.module, context.group
    if rule.is_asynchronous or rule.num_server_processes:
        # A worker keeps the pulled and the pushed values; a server keeps the shared state in its process.
        return 2 * sum(4 * p.numel() for p in module.parameters() if p.requires_grad)
    tracker = StorageTracker(group.device.type)
    with tracker:
        synchroniser = rule.start_synchroniser(context)
        if synchroniser is None:
            return 0
        later = range(num_steps, num_steps + _STEPS_TRIED)
        number = next((number for number in later if synchroniser.is_sync_step(number)), num_steps)
        local_step = LocalStep(number, 1.0, float(group.size))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.grad = torch.empty_like(parameter)
            tracker.label("gradients", [p.grad for p in module.parameters() if p.grad is not None])
            synchroniser.before_update(local_step)
            synchroniser.after_update(local_step)
    synchroniser.close()
    return sum(tracker.now.values()) - tracker.now["gradients"]


def count_codec(rule: Rule, shapes: Mapping[str, tuple[int, ...]], num_workers: int) -> int:
    """Return the bytes of a codec's state of all blocks, while it makes the next state.

    Args:
        rule: Synchronisation rule of the workers.
        shapes: Shapes of the blocks that it exchanges.
        num_workers: Number of workers.
    """
    if not isinstance(rule, EveryStep | PeriodicRule):
        return 0
    codecs = rule.codec.candidates if isinstance(rule.codec, AutoCodec) else (rule.codec,)
    return max(
        sum(_count_block(codec, shape, num_workers) for shape in shapes.values() if not codec.is_dense(Size(shape)))
        for codec in codecs
        if isinstance(codec, Codec)
    )


def _count_block(codec: Codec, shape: tuple[int, ...], num_workers: int) -> int:
    rows = max(1, min(shape[0], _LARGEST_PROBE // max(1, prod(shape[1:]))))
    probe = torch.zeros(rows, *shape[1:])
    exchange = codec.exchange(probe, {}, CodecContext("probe", 0, 0, num_workers))
    request = next(exchange)
    while True:
        payload = request.payload
        answer = payload if isinstance(request, AllReduce | AllToAll) else payload.expand(num_workers, -1).contiguous()
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            kept = sum(tensor.nbytes for tensor in end.value.state.values())
            return int(kept * shape[0] / rows)


def _outline(step: StepDescription) -> nn.Module:
    with torch.device("meta"):
        module, _ = step.build({})
    return module
