"""Estimates of layouts against what a tracker counts in real steps of all their ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_memory_estimate import CPU, TEXT, make_run
from torch import nn

from paceline.comm import join
from paceline.data.batch import Batch
from paceline.data.order import Interval
from paceline.errors import SettingsError
from paceline.memory import Memory
from paceline.memory.absent_group import absent_world
from paceline.parallel.expert import find_experts
from paceline.parallel.pipeline import PipelineSettings
from paceline.recipes.transformer_lm import TransformerLM
from paceline.sync import DiLoCo
from paceline.testing.processes import run_processes
from paceline.topology.layout import Layout
from paceline.training import Run
from paceline.training.building import build_model
from paceline.training.layout_rehearsal import list_distinct, rehearse_rank
from paceline.training.memory_fit import estimate
from paceline.training.memory_probe import MEASURED_STEP, MemoryProbe
from paceline.training.model import FunctionModel
from paceline.training.rehearsal import count_samples
from paceline.training.session import build_replica
from paceline.training.training import prepare

EVEN = TransformerLM(width=32, num_layers=2, num_heads=2, num_experts=4, experts_per_token=4)
"""A model whose tokens use all experts."""
CASES: dict[str, dict[str, Any]] = {
    "zero 3": {"layout": Layout(sharded=4), "num_micro_batches": 2},
    "zero 2": {"layout": Layout(sharded=4, zero_stage=2)},
    "zero 1": {"layout": Layout(sharded=4, zero_stage=1)},
    "replicas of two shards": {"layout": Layout(sharded=2), "memory": Memory(recompute="full")},
    "tensor": {"layout": Layout(tensor=2), "precision": "bf16", "ema": 0.9},
    "context": {"layout": Layout(context=2)},
    "pipeline": {"layout": Layout(pipeline=4), "global_batch": 32},
    "interleaved": {"layout": Layout(pipeline=2), "pipeline": PipelineSettings(order="interleaved")},
    "gpipe, accumulated": {
        "layout": Layout(pipeline=2),
        "pipeline": PipelineSettings(order="gpipe"),
        "num_micro_batches": 2,
    },
    "zero bubble": {"layout": Layout(pipeline=2), "pipeline": PipelineSettings(order="zero_bubble")},
    "tensor, pipeline": {"layout": Layout(tensor=2, pipeline=2)},
    "sharded, pipeline": {"layout": Layout(sharded=2, pipeline=2)},
    "sharded, tensor": {"layout": Layout(sharded=2, tensor=2)},
    "expert": {"layout": Layout(expert=2), "model": EVEN},
}

NAMES = [*CASES]
"""Cases of this file, to which others may add theirs."""


def make(case: str) -> Run:
    if case == "uneven":
        return make_run(layout=Layout(expert=2), model=FunctionModel(path=f"{__file__}:make_uneven"))
    return make_run(**CASES[case])


def make_uneven() -> nn.Module:
    """Return a model whose tokens all use the experts of the last rank."""
    model = EVEN.model_copy(update={"experts_per_token": 2}).build(TEXT.train.spec)
    for experts in find_experts(model).values():
        experts.register_forward_pre_hook(use_last)
    return model


def use_last(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    x_NW, index_NK, weight_NK = args
    return x_NW, torch.arange(2, 4).expand(index_NK.shape), weight_NK


def measure(cases: list[str]) -> dict[str, dict[str, Any]]:
    """Return, by case, what the tracker finds on the rank that needs the most."""
    torch.set_num_threads(1)
    group = join()
    found = {}
    for case in cases:
        run = make(case)
        module, optimizer = prepare(run, build_model(run, TEXT, group), TEXT, group)
        training: Any = SimpleNamespace(run=run, module=module, optimizer=optimizer, num_steps=run.count_steps(TEXT))
        replica = build_replica(training, group)
        probe = MemoryProbe(replica.shard, is_together=True)
        num_samples = count_samples(run, group.size // run.layout.ranks_of_worker)
        data = TEXT.train.read(range(num_samples))
        measured = None
        for _ in range(MEASURED_STEP + 1):
            for number in range(run.num_micro_batches):
                whole = Batch(data, num_samples, Interval(0, run.global_batch), number == run.num_micro_batches - 1)
                batch = replica.shard.split_context(whole)
                with probe.watching(replica, batch), replica.shard.forward_context():
                    if replica.shard.pipeline is not None:
                        replica.backward_through(batch, run.loss.loss_of_output, last=batch.last)
                    else:
                        loss = run.loss.loss(replica, batch)
                        replica.backward(loss.mean, weight=loss.weight, last=batch.last)
                    if batch.last:
                        replica.update()
            measured = probe.end_step(replica)
        if measured is not None:
            found[case] = {"peak": measured.peak_bytes, "rank": measured.of_rank, **measured.bytes_of}
        replica.close()
    group.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_rank_that_needs_the_most_needs_what_was_estimated() -> None:
    results = run_processes(4, measure, {"cases": NAMES})
    for result in results:
        assert result.exit_code == 0, result.output
    wrong = {}
    for case in NAMES:
        run, measured = make(case), results[0].value[case]
        estimated = estimate(run, TEXT, 4, CPU)
        assert not estimated.division
        parts = {name: estimated.bytes_of[name] for name in ("parameters", "gradients", "optimizer", "activations")}
        if abs(estimated.peak_bytes / measured["peak"] - 1) > 0.04:  # 10 % are promised
            wrong[case] = (estimated.peak_bytes, measured, parts)
    assert not wrong


@pytest.mark.slow
def test_ranks_that_share_experts_need_what_was_estimated_and_at_most_what_was_said() -> None:
    results = run_processes(2, measure, {"cases": ["expert", "uneven"]})
    for result in results:
        assert result.exit_code == 0, result.output
    even, uneven = (results[0].value[case]["peak"] for case in ("expert", "uneven"))
    assert estimate(make("expert"), TEXT, 2, CPU).peak_bytes == pytest.approx(even, rel=0.01)
    needed = estimate(make("uneven"), TEXT, 2, CPU)
    assert needed.most_bytes == pytest.approx(uneven, rel=0.01)
    assert needed.most_bytes > 1.1 * needed.peak_bytes


def test_every_stage_is_rehearsed_and_every_rank_that_shares_the_optimizer() -> None:
    layout = Layout(sharded=2, pipeline=3, tensor=2, zero_stage=1)
    axes = layout.resolve(24)
    places = [
        (axes.coordinate(rank, "pipeline"), axes.coordinate(rank, "sharded")) for rank in list_distinct(layout, axes)
    ]
    assert sorted(places) == [(stage, shard) for stage in range(3) for shard in range(2)]
    assert len(list_distinct(Layout(sharded=2, pipeline=3), Layout(sharded=2, pipeline=3).resolve(12))) == 3


def test_stages_need_what_their_place_does() -> None:
    run = make("pipeline")
    first, *_, last = [rehearse_rank(run, TEXT, rank, 4, {}) for rank in range(4)]
    assert first.bytes_of["activations"] > last.bytes_of["activations"]  # 1f1b begins with a micro-batch a stage


def test_the_state_of_a_rule_is_that_of_a_ranks_part() -> None:
    kept = []
    for layout in (Layout(sharded=2), Layout(sharded=4)):
        run = make_run(layout=layout, sync=DiLoCo(period=4))
        kept.append(estimate(run, TEXT, 8, CPU).bytes_of["communication"])
    assert kept[0] == pytest.approx(2 * kept[1], rel=0.05)
    assert kept[1] > 0


def test_a_model_of_many_gigabytes_takes_no_memory() -> None:
    large = make_run(layout=Layout(sharded=2, tensor=2, pipeline=2))
    large = large.model_copy(update={"model": large.model.model_copy(update={"width": 8192, "num_heads": 64})})
    before = torch.empty(0)
    needed = estimate(large, TEXT, 8, CPU)
    assert needed.bytes_of["optimizer"] > 2 * 10**9
    assert not needed.division
    assert not dist.is_initialized()
    assert before.device == CPU


class Foreign(nn.Module):
    """A model that says nothing of how it can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(64, 16), nn.Embedding(32, 16)
        self.h = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.h:
            x = x + layer(x).relu()
        return self.head(x)


def test_a_model_whose_layers_are_found_by_running_it_is_rehearsed() -> None:
    model = FunctionModel(path=f"{__file__}:Foreign")
    kept = [estimate(make_run(layout=layout, model=model), TEXT, 2, CPU) for layout in (Layout(), Layout(pipeline=2))]
    assert not kept[1].division
    assert kept[1].bytes_of["parameters"] < 0.7 * kept[0].bytes_of["parameters"]


def test_a_world_of_absent_ranks_is_the_only_one() -> None:
    refusal = "default process group must not exist in a process that rehearses"
    with absent_world(1, 4) as world:
        assert (world.rank, world.size, dist.get_rank()) == (1, 4, 1)
        with pytest.raises(SettingsError, match=refusal), absent_world(0, 2):
            pass
    assert not dist.is_initialized()
