"""A step of the ranks of a layout, rehearsed on their own parts of the model: nothing is allocated, and nothing sent.

Layouts, pipelines, buckets, clipping and optimizers are the real ones. They run on tensors without contents, in a world
whose other ranks do not exist.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.comm.group import Group
from paceline.data.base import Splits
from paceline.data.batch import Batch, list_tensors, map_tensors
from paceline.data.datasets import SEEDING
from paceline.data.order import Interval
from paceline.memory import Category, Choice, Estimate, StorageTracker, copy_without_contents, counting, recompute
from paceline.memory.absent_group import absent_world
from paceline.memory.estimate import count_codec, count_synchroniser
from paceline.memory.rehearsal import UnknownValues
from paceline.parallel.local import local
from paceline.parallel.mixture_of_experts import used_unevenly
from paceline.parallel.parallelize import find_shard, parallelize, try_plan
from paceline.parallel.pipeline import PipelineSettings
from paceline.parallel.tensor import full_tensor
from paceline.parallel.tensor_derivation import is_derived
from paceline.parallel.tensor_plan import TensorPlan
from paceline.parallel.zero_redundancy import local_optimizer, shard_optimizer
from paceline.replica.bucket_size import FIRST_SIZE
from paceline.replica.optimizer_step import OptimizerStep, autocast
from paceline.replica.reduction import GradientReduction
from paceline.sync import EveryStep
from paceline.sync.synchroniser import WorkerContext
from paceline.topology.layout import Axes, Layout
from paceline.training.building import read_sample
from paceline.training.rehearsal import Forward, RehearsalError, count_samples, find_outline
from paceline.training.run import Run
from paceline.training.training import choose_gather_dtype

_CPU = torch.device("cpu")
_MOST_TRIED = 100_000_000
"""Number of parameters up to which a model is built whole to find its tensor plan."""


def estimate_layout(
    run: Run, splits: Splits, num_ranks: int, choices: Mapping[str, Choice], device: torch.device
) -> Estimate:
    """Return the memory of the rank that needs the most.

    Each rank whose part differs is rehearsed: all stages of a pipeline and, where the optimizer alone is sharded, all
    ranks that share it. Along other axes the first rank has the largest part. Costs of a pipeline's stages are
    estimated, also where the run measures them. Experts are used evenly, and once more as unevenly as can be.

    Args:
        run: A run with a layout that shares the model, or its sequences.
        splits: Training and held-out data.
        num_ranks: Number of all ranks.
        choices: Recomputation by the block's name.
        device: Device of the training; the rehearsal itself is one on CPUs.

    Raises:
        RehearsalError: The model's tensor plan is found by trying, and it is too large for that here.
    """
    plan = find_rehearsed_plan(run, splits)
    axes = run.layout.resolve(num_ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks will warn

        def rehearse_worst() -> Estimate:
            ranks = list_distinct(run.layout, axes)
            found = [rehearse_rank(run, splits, rank, num_ranks, choices, device, plan) for rank in ranks]
            return max(found, key=lambda needed: needed.peak_bytes)

        needed = rehearse_worst()
        if run.layout.expert == 1:
            return needed
        with used_unevenly():
            return replace(needed, most_bytes=rehearse_worst().peak_bytes)


def find_rehearsed_plan(run: Run, splits: Splits) -> TensorPlan | Mapping[str, str] | None:
    """Return the run's tensor plan, which may take trying it on the model, with values, as ranks do.

    That of a model without registered types is tried even if the run names styles: which numbers of heads its modules
    must see divided is found so.

    Raises:
        RehearsalError: The model is too large for that.
    """
    module = find_outline(run, splits)
    if run.layout.tensor == 1 or not is_derived(module, None):
        return run.tensor_plan
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    if num_parameters > _MOST_TRIED:
        raise RehearsalError(
            f"a tensor plan must be known for ranks of a model of more than {_MOST_TRIED:,} parameters to be "
            f"rehearsed, but it is found by trying and there are {num_parameters:,}; register its types"
        )
    with SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        module = run.model.build(splits.train.spec)
    return try_plan(module, run.tensor_plan, run.layout.tensor, read_sample(run, splits, _CPU))


def list_distinct(layout: Layout, axes: Axes) -> list[int]:
    """Return the ranks of which one has the largest part of the model."""
    return axes.ranks_along(0, "pipeline", *(("sharded",) if layout.shards_optimizer else ()))


def rehearse_rank(
    run: Run,
    splits: Splits,
    rank: int,
    num_ranks: int,
    choices: Mapping[str, Choice],
    device: torch.device = _CPU,
    plan: TensorPlan | Mapping[str, str] | None = None,
) -> Estimate:
    """Return the memory of one rank in a later step, with a tensor plan; for other arguments see `estimate_layout`."""
    original, sample = find_outline(run, splits), splits.train.read_first()
    modes = FakeTensorMode(allow_non_fake_inputs=True), UnknownValues()  # type: ignore[no-untyped-call]
    with absent_world(rank, num_ranks) as world, modes[0], modes[1]:
        gather_dtype = choose_gather_dtype(run.precision, device)
        sample = map_tensors(torch.empty_like, sample)
        rehearsal = _Rehearsal(run, splits, original, sample, world, choices, gather_dtype, plan)
        bytes_of, shapes, num_workers = rehearsal.run()
        rehearsal.close()
    bytes_of["communication"] += count_codec(run.sync, shapes, num_workers)
    if run.sharded_codec is not None:
        bytes_of["communication"] += count_codec(EveryStep(codec=run.sharded_codec), shapes, run.layout.sharded)
    return Estimate(bytes_of)


class _Rehearsal:
    """One rank's steps; made and run inside of a rehearsal's modes."""

    def __init__(
        self,
        run: Run,
        splits: Splits,
        original: nn.Module,
        sample: Any,
        world: Group,
        choices: Mapping[str, Choice],
        gather_dtype: torch.dtype | None,
        plan: TensorPlan | Mapping[str, str] | None,
    ) -> None:
        self._run, self._sample, self._num_steps = run, sample, run.count_steps(splits)
        self._num_samples = count_samples(run, max(1, world.size // run.layout.ranks_of_worker))
        inputs = Batch(sample, 1, Interval(0, 1)).inputs
        module = copy_without_contents(original)
        recompute(module, choices)
        self._module = parallelize(
            module,
            run.layout,
            group=world,
            tensor_plan=plan,
            pipeline=_without_measuring(run.pipeline),
            sample=inputs,
            gather_dtype=gather_dtype,
            num_samples=self._num_samples,
        )
        self._shard = find_shard(self._module, world)
        self._optimizer = run.optimizer.build(self._module)
        if self._shard.mesh is not None and run.layout.shards_optimizer:
            self._optimizer = shard_optimizer(self._optimizer, self._shard.mesh)
        self._parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        # Loss scaling keeps nothing, and would read whether gradients are finite.
        self._step = OptimizerStep(None, "fp32", run.clip_norm, self._shard, self._parameters)
        self._reduction = GradientReduction(
            self._module,
            self._parameters,
            self._optimizer,
            self._step,
            shard=self._shard,
            rule=EveryStep() if isinstance(run.sync, EveryStep) else run.sync,
            bucket_bytes=run.bucket_bytes or FIRST_SIZE,
            landing="update",
            seed=0,
        )
        if self._shard.pipeline is not None:
            self._shard.pipeline.stand_alone(copy_without_contents(original), inputs, self._cut_tokens)

    def run(self) -> tuple[dict[Category, int], dict[str, tuple[int, ...]], int]:
        """Return bytes by purpose at the peak of the second step, shapes of gradients, and workers that sum them."""
        self._take_step()
        tracker = StorageTracker("cpu")
        tracker.label("gradients", self._reduction.list_buffers())
        if self._shard.pipeline is not None:
            tracker.label("communication", self._shard.pipeline.buffers)
        with counting(self._module, local_optimizer(self._optimizer), "cpu", tracker):
            tracker.reset_peak()
            self._take_step()
        bytes_of = dict(tracker.peak)
        parameters = {name: local(parameter) for name, parameter in self._parameters.items()}
        if self._run.ema is not None:
            bytes_of["optimizer"] += sum(p.numel() * max(4, p.element_size()) for p in parameters.values())
        group = self._shard.group
        if group.size > 1:
            held = None if self._shard.is_whole else {name: tensor.detach() for name, tensor in parameters.items()}
            context = WorkerContext(
                self._module, self._optimizer, group, world=self._shard.world, local_parameters=held
            )
            bytes_of["communication"] += count_synchroniser(self._run.sync, context, self._num_steps)
        return bytes_of, {name: tuple(parameter.shape) for name, parameter in parameters.items()}, group.size

    def _take_step(self) -> None:
        self._reduction.begin_backward(is_first=True)
        num_micro_batches = min(self._run.num_micro_batches, 2)  # the second adds to gradients, like all later ones
        for number in range(num_micro_batches):
            self._run_micro_batch(last=number == num_micro_batches - 1)
        self._reduction.receive(1.0, 0, may_skip=True)  # values tell nothing here
        self._step.run(self._optimizer, 0, lambda is_overflown: None)
        self._reduction.finish(skipped=False)

    def _run_micro_batch(self, *, last: bool) -> None:
        run, shard = self._run, self._shard
        data = map_tensors(lambda tensor: tensor.new_empty(self._num_samples, *tensor.shape[1:]), self._sample)
        batch = shard.split_context(Batch(data, self._num_samples, Interval(0, run.global_batch), last))
        with shard.forward_context():
            if shard.pipeline is not None:
                shard.begin_backward(last=last)
                with autocast(run.precision, "cpu"):
                    shard.pipeline.run(tuple(list_tensors(batch.inputs)), batch.data, self._compute_loss)
                if last:
                    shard.reduce_tied_gradients(self._parameters)
                    self._reduction.arm(lambda: 1.0, 1.0, 0, 1.0)
            else:
                forward = Forward(self._module, run.precision, "cpu", shard.forward_pass)
                loss = run.loss.loss(forward, batch).mean
                shard.begin_backward(last=last)
                if last:
                    self._reduction.arm(lambda: 1.0, 1.0, 0, 1.0)
                full_tensor(loss).backward()
            self._reduction.end_backward(last=last, collect=shard.pipeline is not None)

    def _compute_loss(self, output: Tensor, data: Any) -> Tensor:
        num_samples = len(list_tensors(data)[0])
        batch = Batch(data, num_samples, Interval(0, self._run.global_batch))
        return self._run.loss.loss_of_output(output, batch).mean

    def _cut_tokens(self, whole: Tensor) -> Tensor:
        """Return what the tensor axis leaves of activations between stages."""
        size = self._run.layout.tensor
        if not (self._shard.cuts_tokens and whole.is_floating_point() and whole.dim() > 1):
            return whole
        return whole.narrow(-2, 0, whole.shape[-2] // size).contiguous().requires_grad_(whole.requires_grad)

    def close(self) -> None:
        """Remove hooks and groups."""
        self._reduction.close()
        self._shard.close()


def _without_measuring(settings: PipelineSettings) -> PipelineSettings:
    return settings if settings.cuts != "measured" else settings.model_copy(update={"cuts": "estimated"})
