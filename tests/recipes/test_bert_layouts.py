"""BERT is laid out over ranks in any way and learns what one process does; how many tokens are asked for is uneven."""

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import join
from paceline.comm.local_group import LocalGroup
from paceline.data.base import Spec
from paceline.data.batch import Batch
from paceline.data.masked_text import NOT_ASKED
from paceline.data.order import Interval, apportion
from paceline.parallel.parallelize import parallelize
from paceline.recipes.bert import Bert
from paceline.replica.replica import Replica
from paceline.replica.state import capture
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout
from paceline.training.objective import MaskedLM

LAYOUTS = [
    {"tensor": 2, "context": 2},
    {"tensor": 2, "pipeline": 2},
    {"sharded": 2, "zero_stage": 3, "tensor": 2},
]
NUM_TOKENS, VOCABULARY, GLOBAL_BATCH, NUM_STEPS = 16, 24, 8, 3


def make_batch(step: int, first: int, count: int) -> Batch:
    """Sample i is asked for i tokens, from the sequence's start: ranks with its end, or sample 0, for none."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(5, (GLOBAL_BATCH, NUM_TOKENS), generator=generator)
    is_asked = torch.arange(NUM_TOKENS) < torch.arange(GLOBAL_BATCH)[:, None]
    samples = slice(first, first + count)
    inputs, targets = tokens.masked_fill(is_asked, VOCABULARY - 1), tokens.masked_fill(~is_asked, NOT_ASKED)
    return Batch((inputs[samples], targets[samples]), count, Interval(0, GLOBAL_BATCH))


def take_step(replica: Replica, step: int) -> tuple[float, float, float]:
    shard = replica.shard
    shares = apportion(GLOBAL_BATCH, [1.0 + reader for reader in range(shard.data_parallel_group.size)])
    batch = shard.split_context(
        make_batch(step, sum(shares[: shard.data_parallel_group.rank]), shares[shard.data_parallel_group.rank])
    )
    with shard.forward_context():
        if shard.pipeline is not None:
            replica.backward_through(batch, MaskedLM().loss_of_output)
        else:
            loss = MaskedLM().loss(replica, batch)
            replica.backward(loss.mean, weight=loss.weight)
    result = replica.update()
    assert result.gradient_norm is not None
    return result.loss, result.gradient_norm, result.weight


def train(group: Any, layout: Layout) -> tuple[list[tuple[float, float, float]], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Bert(width=16, num_layers=2, num_heads=4, dropout=0.0).build(Spec(VOCABULARY, (NUM_TOKENS,)))
    module = parallelize(model, layout, group=group, sample=torch.zeros(1, NUM_TOKENS, dtype=torch.int64))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
    replica = Replica(module, optimizer, group=group, clip_norm=0.5, hash_interval=1)
    numbers = [take_step(replica, step) for step in range(NUM_STEPS)]
    tensors, _ = capture(replica)
    replica.close()
    return numbers, {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("model/")}


def compare(layouts: list[dict[str, int]]) -> list[list[float]]:
    """Return how far each layout's numbers and parameters are from one process's."""
    group = join()
    torch.set_num_threads(1)
    numbers, tensors = train(LocalGroup(), Layout())
    differences = []
    for layout in layouts:
        their_numbers, their_tensors = train(group, Layout.model_validate(layout))
        if group.rank == 0:
            assert their_tensors.keys() == tensors.keys()
            number = (torch.tensor(their_numbers) - torch.tensor(numbers)).abs().max()
            parameter = max((their_tensors[name] - tensors[name]).abs().max() for name in tensors)
            differences.append([float(number), float(parameter)])
    group.close()
    return differences


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_layout_trains_as_one_process() -> None:
    results = run_processes(4, compare, {"layouts": LAYOUTS}, timeout_s=110)
    check_exits(results)
    for layout, (number, parameter) in zip(LAYOUTS, results[0].value, strict=True):
        # Sums of float32 in another order; AdamW's first steps divide by gradients near 0.
        assert number < 2e-5, layout
        assert parameter < 2e-4, layout


def test_one_process_learns() -> None:
    numbers, _ = train(LocalGroup(), Layout())
    assert [weight for _, _, weight in numbers] == [28] * NUM_STEPS
    assert numbers[-1][0] < numbers[0][0]
