"""BatchNorm over ranks that are processes, in layouts, recomputed and compiled, equals one process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_batch_norm import build, list_steps, make_data, make_sgd, train_alone
from torch import nn
from torch.utils.data import TensorDataset

from paceline.comm import join
from paceline.data import Batch, Interval, Loader
from paceline.memory import find_recomputable, recompute
from paceline.parallel.parallelize import parallelize
from paceline.replica import Loss, Replica
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout
from paceline.training.compiling import compile_blocks

CASES: list[dict[str, Any]] = [
    {"landing": "next_forward"},
    {"recompute": "selective"},
    {"recompute": "full", "sharded": 2, "zero_stage": 3},
    {"sharded": 2, "zero_stage": 1},
    {"compiler": "aot_eager", "sharded": 2, "zero_stage": 2},
]


def compare(cases: list[dict[str, Any]]) -> list[list[float]]:
    """Return, for each case, by how much losses and buffers differ from those of a plain loop."""
    expected, state = train_alone("resnet", list_steps(3))
    with join():
        return [run_case(case, expected, state) for case in cases]


def run_case(case: dict[str, Any], expected: list[float], state: dict[str, torch.Tensor]) -> list[float]:
    layout = Layout(sharded=case.get("sharded", 1), zero_stage=case.get("zero_stage", 3))
    module = build("resnet")
    if "recompute" in case:
        recompute(module, dict.fromkeys(find_recomputable(module), case["recompute"]))
    module = parallelize(module, layout)
    if "compiler" in case:
        compile_blocks(module, case["compiler"])
    replica = Replica(module, make_sgd(module), landing=case.get("landing", "update"), batch_norm="global")
    losses = []
    for batch in Loader(make_data("resnet"), 8, num_steps=3, shares=[3, 1]):
        replica.backward(F.cross_entropy(replica(batch.inputs), batch.targets), weight=batch.count())
        losses.append(replica.update().loss)
    replica.close()
    loss = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    buffers = dict(module.named_buffers())
    assert len(buffers) > 50
    return [loss, max(float((buffer - state[name]).abs().max()) for name, buffer in buffers.items())]


def _make_blocks() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)]


def count_batches() -> list[int]:
    """Return how many batches BatchNorm has counted after one with samples and one without, in two layouts."""
    with join() as group:
        torch.manual_seed(0)
        module = parallelize(nn.Sequential(*_make_blocks()), Layout(pipeline=2), sample=torch.randn(2, 3))
        replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for num_samples, last in ((8, False), (0, True)):
            batch = Batch(torch.randn(max(num_samples, 1), 3), num_samples, Interval(0, 8), last=last)
            replica.backward_through(
                batch, lambda output, part: Loss(output.square().mean(), part.num_samples), last=last
            )
        replica.update()
        counts = [int(buffer) for name, buffer in module.named_buffers() if "num_batches" in name]

        module = nn.Sequential(*_make_blocks())
        recompute(module, {"0": "full", "1": "full"})
        module = parallelize(module, Layout(sharded=2))
        replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for batch in Loader(TensorDataset(torch.randn(8, 3)), 4, num_steps=2, shares=[1, 0]):
            replica.backward(replica(*batch.data).square().mean(), weight=batch.count())
            replica.update()
        replica.close()
        group.barrier()
        return counts + [int(buffer) for name, buffer in module.named_buffers() if "num_batches" in name]


@pytest.mark.timeout(120)
def test_a_borrowed_sample_counts_for_nothing_in_layouts() -> None:
    """In a pipeline 8 samples are 4 micro-batches for the layer of each stage; sharded, one rank has none."""
    results = run_processes(2, count_batches, timeout_s=100)
    check_exits(results)
    assert [result.value for result in results] == [[4, 2, 2], [4, 0, 0]]


@pytest.mark.timeout(120)
def test_ranks_equal_one_process() -> None:
    results = run_processes(2, compare, {"cases": CASES}, timeout_s=100)
    check_exits(results)
    for result in results:
        for case, (loss, buffer) in zip(CASES, result.value, strict=True):
            assert loss < 1e-10, case
            assert buffer < 1e-10, case
