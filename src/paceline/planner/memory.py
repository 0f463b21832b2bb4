"""How much memory each rank of a run needs, before anything is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Size
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.compression.codec import Codec, Place, Reduce, Scatter
from paceline.data.base import Splits
from paceline.memory import Act, Category, StorageTracker, rehearse
from paceline.memory.absent_group import AbsentGroup
from paceline.memory.rehearsal import UnknownValues
from paceline.sync import EveryStep
from paceline.sync.periodic import PeriodicRule
from paceline.sync.synchroniser import LocalStep, Site
from paceline.topology.layout import Layout
from paceline.training.rehearsal import check_device, choose_blocks, describe, guarded
from paceline.training.run import Run

_LARGEST_PROBE = 1 << 16
"""Elements of a block that codecs are tried on; what they keep of larger ones is in proportion."""
_PERIODS_TRIED = 4096


@dataclass(frozen=True)
class Estimate:
    """Bytes of tensors that one rank needs at its worst moment."""

    bytes_of: Mapping[Category, int]
    """By what they are for, on the device."""
    host_bytes: int = 0
    """What is offloaded to CPU memory, where the device is a GPU."""

    @property
    def peak_bytes(self) -> int:
        """All of them on the device."""
        return sum(self.bytes_of.values())


def estimate(run: Run, splits: Splits, num_ranks: int, device: torch.device) -> Estimate:
    """Return the memory that a step of `run` needs on each of `num_ranks` ranks.

    One whole step is rehearsed on tensors without contents, with the run's own model, objective, optimizer, precision,
    micro-batches and savings: parameters, gradients in their buckets, optimizer state, and what forward and backward
    make, each until it is let go of. What codecs and synchronisation rules keep is added. It is what a tracker of
    tensors counts in the real step; of what it does not see (Python and its libraries, workspaces of kernels, batches
    read ahead, a checkpoint being written) nothing is in it.

    With a layout that shares the model, the step of a whole model is divided as `divide` says, which is rougher.

    Raises:
        SettingsError: The model cannot be rehearsed, or its savings cannot be had.
    """
    check_device(run, device)
    layout = run.layout
    num_workers = max(1, num_ranks // layout.ranks_of_worker)
    choices = choose_blocks(run, splits, num_workers, device)
    act = describe(run, splits, num_workers, device)
    rehearsed = guarded(lambda: rehearse(act, choices))
    bytes_of = dict(rehearsed.peak)
    if num_workers > 1:
        bytes_of["communication"] += guarded(lambda: _count_rule(run, act, num_workers))
        bytes_of["communication"] += _count_codec(run, act, num_workers)
    whole = Estimate(bytes_of, sum(rehearsed.host.values()))
    return whole if layout.is_plain else divide(whole, layout, run.num_micro_batches)


def divide(whole: Estimate, layout: Layout, num_micro_batches: int = 1) -> Estimate:
    """Return what a rank needs of a model that a layout shares, from what a whole one needs.

    Reckoned from the division alone: the tensor axis and the pipeline divide parameters, gradients, optimizer state and
    activations; the context axis activations; of the sharded axis stage 1 divides optimizer state, stage 2 gradients
    too where no micro-batches add them up whole, stage 3 parameters too. A stage of a pipeline holds as many
    micro-batches' activations as there are stages, or as there are micro-batches. What is whole on every rank (norms,
    embeddings of another stage), and a block's parameters gathered from the sharded axis, are not in it: it may be a
    fifth too low.
    """
    model = layout.tensor * layout.pipeline
    accumulates = num_micro_batches > 1 or layout.pipeline > 1
    sharded: dict[Category, int] = {
        "optimizer": layout.sharded,
        "gradients": layout.sharded if layout.zero_stage >= 2 and not accumulates else 1,
        "parameters": layout.sharded if layout.zero_stage == 3 else 1,
    }
    in_flight = min(layout.pipeline, num_micro_batches)
    bytes_of = {
        category: -(-num_bytes // (model * sharded.get(category, 1))) for category, num_bytes in whole.bytes_of.items()
    }
    for category in ("activations", "temporary"):
        bytes_of[category] = -(-whole.bytes_of[category] * in_flight // (model * layout.context))
    return Estimate(bytes_of, -(-whole.host_bytes // (model * layout.sharded)))


def _count_rule(run: Run, act: Act, num_workers: int) -> int:
    """Return the bytes that a rule which does more than to sum gradients keeps, in a step at which workers meet."""
    if run.sync.is_asynchronous or run.sync.num_server_processes:
        # A worker keeps what it pulled and what it pushes; a server in its process the shared state.
        return 2 * sum(4 * prod(shape) for shape in _shapes(act).values())
    group = AbsentGroup(0, num_workers, act.device)
    with FakeTensorMode(allow_non_fake_inputs=True), UnknownValues():  # type: ignore[no-untyped-call]
        with act.device:
            module, optimizer = act.build({})
        tracker = StorageTracker(act.device.type)
        with tracker:
            synchroniser = run.sync.start_synchroniser(Site(module, optimizer, group, run.seed, group))
            if synchroniser is None:
                return 0
            first = run.num_steps
            number = next((n for n in range(first, first + _PERIODS_TRIED) if synchroniser.meets(n)), first)
            step = LocalStep(number, 1.0, float(num_workers))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.grad = torch.empty_like(parameter)
                tracker.label("gradients", [p.grad for p in module.parameters() if p.grad is not None])
                synchroniser.before_update(step)
                synchroniser.after_update(step)
        synchroniser.close()
        return sum(tracker.now.values()) - tracker.now["gradients"]


def _count_codec(run: Run, act: Act, num_workers: int) -> int:
    """Return the bytes that a codec keeps of all blocks, while it makes those that will replace them."""
    if not isinstance(run.sync, EveryStep | PeriodicRule):
        return 0
    codec = run.sync.codec
    return sum(
        _count_block(codec, shape, num_workers) for shape in _shapes(act).values() if not codec.is_dense(Size(shape))
    )


def _count_block(codec: Codec, shape: tuple[int, ...], num_workers: int) -> int:
    rows = max(1, min(shape[0], _LARGEST_PROBE // max(1, prod(shape[1:]))))
    probe = torch.zeros(rows, *shape[1:])
    exchange = codec.exchange(probe, {}, Place("probe", 0, 0, num_workers))
    request = next(exchange)
    while True:
        payload = request.payload
        answer = payload if isinstance(request, Reduce | Scatter) else payload.expand(num_workers, -1).contiguous()
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            kept = sum(tensor.nbytes for tensor in end.value.state.values())
            return int(kept * shape[0] / rows)


def _shapes(act: Act) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        module, _ = act.build({})
    return {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
