"""`bench layouts`: a step of each layout beside the same thing assembled by hand from PyTorch's parts."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isclose
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from paceline.benchmarks import layouts_by_hand as by_hand
from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.problems import Problem, make_optimizer
from paceline.benchmarks.workers import Workers
from paceline.comm import Group, join
from paceline.data.base import Spec
from paceline.data.batch import Batch
from paceline.data.order import Interval
from paceline.errors import SettingsError
from paceline.monitor.events import PipelineMeasured
from paceline.monitor.pipeline import PipelineStep
from paceline.parallel.model_shard import ModelShard
from paceline.parallel.parallelize import parallelize
from paceline.parallel.pipeline import OrderName, PipelineSettings
from paceline.recipes.transformer_lm.model import TransformerLM
from paceline.registry import register
from paceline.replica.replica import Replica
from paceline.topology.layout import Layout
from paceline.training.objective import NextToken

CaseName = Literal["tensor", "zero_3", "zero_2", "zero_1", "1f1b", "gpipe", "data_tensor", "context"]
_VOCABULARY = 256
_LOSS_TOLERANCE = 1e-3
"""Relative, after all steps: the sides add in other orders, and AdamW divides by gradients that are nearly 0."""


@dataclass(frozen=True)
class _Case:
    layout: Layout
    title: str
    reference_name: str
    order: OrderName = "1f1b"

    @property
    def num_ranks(self) -> int:
        return (self.layout.data or 1) * self.layout.workers_of_replica * self.layout.ranks_of_worker


_CASES: dict[CaseName, _Case] = {
    "tensor": _Case(Layout(tensor=2), "tensor 2", "parallelize_module"),
    "zero_3": _Case(Layout(sharded=2, zero_stage=3), "sharded 2, zero_stage 3", "fully_shard"),
    "zero_2": _Case(Layout(sharded=2, zero_stage=2), "sharded 2, zero_stage 2", "fully_shard, no reshard"),
    "zero_1": _Case(Layout(sharded=2, zero_stage=1), "sharded 2, zero_stage 1", "DDP, ZeroRedundancyOptimizer"),
    "1f1b": _Case(Layout(pipeline=2), "pipeline 2, 1f1b", "Schedule1F1B", "1f1b"),
    "gpipe": _Case(Layout(pipeline=2), "pipeline 2, gpipe", "ScheduleGPipe", "gpipe"),
    "data_tensor": _Case(Layout(data=2, tensor=2), "data 2 x tensor 2", "parallelize_module, all-reduce"),
    "context": _Case(Layout(context=2), "context 2", "one process"),
}


@dataclass
class Measured:
    """What one rank measured of a case."""

    times: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "reference": []})
    losses: dict[str, float | None] = field(default_factory=dict)
    pipeline: list[PipelineMeasured] = field(default_factory=list)


@register("layouts")
class LayoutsBenchmark(Benchmark):
    """Step time of each layout beside the same assembled by hand from PyTorch's parts, which it must compute as well.

    Two or four processes with one thread each hold both sides and take steps in turn (A B B A ...); a step's time is
    the slowest rank's from one barrier to the end of its update. Both sides have the same cuts, micro-batches and fused
    AdamW, clip nothing, and run torch's collectives on the same process groups; Paceline's sums along data are its own.
    There is no counterpart of the context axis on CPUs in PyTorch: its row is beside one process with whole sequences.
    """

    cases: tuple[CaseName, ...] = ("tensor", "zero_3", "zero_2", "zero_1", "1f1b", "gpipe", "data_tensor", "context")
    """Axes of two ranks each; ``zero_`` are stages of the sharded axis, ``1f1b`` and ``gpipe`` orders of a pipeline."""
    model: TransformerLM = TransformerLM(width=192, num_layers=4, num_heads=6)
    """Model to train; by default one of 1.8 million parameters."""
    sequence_length: int = Field(default=128, ge=1)
    num_samples: int = Field(default=8, ge=1)
    """Sequences in a step of each rank that reads its own; those of a pipeline are cut into 4 micro-batches."""
    num_pairs: int = Field(default=40, ge=4)
    """Timed pairs of steps of each case."""
    num_warm_up: int = Field(default=5, ge=1)
    """Pairs before those: gradients find their buckets, and allocators their blocks."""
    num_bubbles: int = Field(default=11, ge=1)
    """Steps of each pipeline whose bubble is measured, apart from the timed ones."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.sequence_length % 4 or self.num_samples % 4:
            raise SettingsError(
                f"sequence_length and num_samples must be multiples of 4, but got {self.sequence_length} and "
                f"{self.num_samples}; choose others, or ranks cannot have equal parts"
            )
        return self

    def measure(self) -> list[BenchmarkRow]:
        """Run all cases, those of as many processes in one start."""
        found: dict[CaseName, list[Measured]] = {}
        for num_ranks in sorted({_CASES[name].num_ranks for name in self.cases}):
            names = [name for name in self.cases if _CASES[name].num_ranks == num_ranks]
            by_rank = Workers(num_workers=num_ranks).start(measure_cases, self, names)
            found |= {name: [by_rank[rank][i] for rank in range(num_ranks)] for i, name in enumerate(names)}
        return [row for name in self.cases for row in self._describe(name, found[name])]

    def make_problem(self, seed: int) -> Problem:
        """Return the model, the same everywhere, and the samples of the ranks that have this `seed`."""
        torch.manual_seed(0)
        module = self.model.build(Spec(_VOCABULARY, (self.sequence_length,)))
        shape = self.num_samples, self.sequence_length + 1
        tokens = torch.randint(_VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
        return Problem(module, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def _describe(self, name: CaseName, ranks: list[Measured]) -> list[BenchmarkRow]:
        case = _CASES[name]
        losses = {
            side: statistics.fmean(loss for rank in ranks if (loss := rank.losses[side]) is not None)
            for side in ("ours", "reference")
        }
        assert isclose(*losses.values(), rel_tol=_LOSS_TOLERANCE), (
            f"both sides of {name} must compute the same: {losses}"
        )
        ours, reference = (
            [max(times) for times in zip(*(rank.times[side] for rank in ranks), strict=True)]
            for side in ("ours", "reference")
        )
        rows = [BenchmarkRow.of_pairs(self.name, case.title, "step time", "s", ours, reference, case.reference_name)]
        if ranks[0].pipeline:
            rows.append(self._describe_bubble(case, ranks))
        return rows

    def _describe_bubble(self, case: _Case, ranks: list[Measured]) -> BenchmarkRow:
        told = zip(*(rank.pipeline for rank in ranks), strict=True)
        steps = [PipelineStep(epoch=0, step=number, events=events) for number, events in enumerate(told)]
        bubble, formula = statistics.median(step.bubble for step in steps), steps[0].formula
        assert formula is not None
        said = "formula for equal stages"
        return BenchmarkRow(self.name, case.title, "bubble", "of a step", bubble, formula, said, bubble / formula)


def measure_cases(settings: LayoutsBenchmark, names: list[CaseName]) -> list[Measured]:
    """Measure some cases, one after the other. Every rank runs it."""
    torch.set_num_threads(1)
    with join() as group:
        return [_measure_case(settings, name, group) for name in names]


def _measure_case(settings: LayoutsBenchmark, name: CaseName, group: Group) -> Measured:
    case, found = _CASES[name], Measured()
    axes = case.layout.resolve(group.size)
    seed = axes.coordinate(group.rank, "data") + axes.coordinate(group.rank, "sharded")
    problem = settings.make_problem(seed)
    other = problem.copy()
    module = parallelize(
        problem.module, case.layout, group=group, pipeline=PipelineSettings(order=case.order), sample=problem.inputs[:1]
    )
    replica = Replica(module, make_optimizer(module), group=group, hash_interval=0)
    shard = replica.shard
    steps = {"ours": _make_our_step(replica, problem), "reference": _make_reference_step(name, other, shard)}
    for pair in range(-settings.num_warm_up, settings.num_pairs):
        for side in ("ours", "reference") if pair % 2 else ("reference", "ours"):
            group.barrier()
            began_s = time.perf_counter()
            loss = steps[side]()
            if pair >= 0:
                found.times[side].append(time.perf_counter() - began_s)
            found.losses[side] = None if loss is None else float(loss)
    if shard.pipeline is not None:
        found.pipeline = [_measure_bubble(replica, problem) for _ in range(settings.num_bubbles)]
    group.barrier()  # nobody lets go of what another still waits for
    del steps
    replica.close()
    return found


def _make_our_step(replica: Replica, problem: Problem) -> Callable[[], float]:
    shard, objective = replica.shard, NextToken()
    batch = shard.split_context(_make_batch(problem))

    def step() -> float:
        with shard.forward_context():
            if shard.pipeline is not None:
                replica.backward_through(batch, objective.loss_of_output)
            else:
                loss = objective.loss(replica, batch)
                replica.backward(loss.mean, weight=loss.weight)
        return replica.update().loss

    return step


def _make_reference_step(name: CaseName, problem: Problem, shard: ModelShard) -> Callable[[], Tensor | None]:
    mesh = shard.mesh
    assert mesh is not None
    if shard.pipeline is not None:
        names = [layer.name for layer in shard.pipeline.layers_of_stages[0]]
        return by_hand.make_pipeline_step(
            problem,
            mesh,
            order=shard.pipeline.settings.order,
            num_first_layers=sum(name.startswith("layers.") for name in names),
            num_micro_batches=shard.pipeline.settings.count_micro_batches(len(problem.inputs), mesh.size("pipeline")),
        )
    if name == "context":
        return by_hand.make_single_step(problem, mesh)
    if name == "zero_1":
        return by_hand.make_shared_optimizer_step(problem, mesh)
    if shard.layout.shards_parameters:
        return by_hand.make_sharded_step(problem, mesh, zero_stage=shard.layout.zero_stage)
    return by_hand.make_tensor_step(problem, mesh)


def _measure_bubble(replica: Replica, problem: Problem) -> PipelineMeasured:
    batch = _make_batch(problem)
    pipeline = replica.shard.pipeline
    assert pipeline is not None
    replica.backward_through(batch, NextToken().loss_of_output, timed=True)
    replica.update()
    assert pipeline.times is not None
    return pipeline.times.to_event()


def _make_batch(problem: Problem) -> Batch:
    num_samples = len(problem.inputs)
    return Batch((problem.inputs, problem.targets), num_samples, Interval(0, num_samples))
