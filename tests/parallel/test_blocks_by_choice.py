"""Hard mixtures of experts of one's own, sharded: exact, or refused on every rank before an update."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.errors import MismatchError
from paceline.replica import Loss
from paceline.testing.processes import check_exits, run_processes

NUM_STEPS = 4


class Branches(nn.Module):
    """One of two branches by the samples' sum, which differs between ranks; both have the same sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.small, self.large = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.large(x) if x[..., 0].sum() > 0 else self.small(x)


def train(layout: paceline.Layout | None, sample: Tensor | None) -> list[float]:
    torch.manual_seed(3)
    model: nn.Module = Branches().double()
    inputs = torch.randn(NUM_STEPS * 2, 1, 4, dtype=torch.float64)
    inputs[:, :, 0] = torch.tensor([9.0, -9.0] * NUM_STEPS).view(-1, 1)  # of each step one of each kind
    dataset = torch.utils.data.TensorDataset(inputs, inputs.square().sum(-1))
    if layout is not None:
        model = paceline.parallelize(model, layout, sample=sample)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    replica = paceline.Replica(model, optimizer, clip_norm=0.5)
    losses = []
    for batch in paceline.Loader(dataset, global_batch=2, num_steps=NUM_STEPS, shuffle=False):
        # One sample at a time, since a batch has one choice: ranks of a layout have one each.
        output = torch.cat([replica(one) for one in batch.inputs.split(1)])
        made = (output.sum(-1) - batch.targets).square().mean()
        replica.backward(Loss(made, len(batch.targets)))
        losses.append(replica.update().loss)
    replica.close()
    return losses


def try_choices(zero_stages: list[Any]) -> list[Any]:
    torch.set_num_threads(1)
    said: list[Any] = []
    for zero_stage in zero_stages:
        with paceline.join():
            sample = torch.ones(1, 1, 4, dtype=torch.float64)
            said.append(train(paceline.Layout(sharded=2, zero_stage=zero_stage), sample))
    with paceline.join():
        try:
            said.append(train(paceline.Layout(sharded=2), None))
        except MismatchError as error:
            said.append(str(error))
    return said


@pytest.mark.timeout(90)
@pytest.mark.parametrize("zero_stages", [[3], pytest.param([2], marks=pytest.mark.slow)])
def test_a_branch_that_the_sample_does_not_show_is_exact_and_without_a_sample_refused(zero_stages: list[int]) -> None:
    results = run_processes(2, try_choices, {"zero_stages": zero_stages}, timeout_s=60)
    check_exits(results)
    alone = train(None, None)
    for result in results:
        *trained, refused = result.value
        assert trained == [pytest.approx(alone, rel=1e-12)]
        assert isinstance(refused, str)
        assert "gather 3 of a step was of" in refused
        assert "large.0 on rank" in refused or "small.0 on rank" in refused
        assert "give parallelize a sample" in refused
