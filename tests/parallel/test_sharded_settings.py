"""What of sharding needs no other rank: which modules are blocks, what is refused, one rank changes nothing."""

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import LocalGroup
from paceline.errors import SettingsError
from paceline.parallel.fully_sharded import find_blocks, reshard, set_gradient_sync, shard_module
from paceline.parallel.local import local, local_slice, wrap
from paceline.parallel.mesh import Mesh
from paceline.parallel.zero_redundancy import local_optimizer, shard_optimizer
from paceline.topology.layout import Axes, Layout


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.wide(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList([Block(), Block()])

    def loss(self) -> Tensor:
        x = self.scale * torch.ones(2, 5)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.1)


def test_blocks_are_the_outermost_repeated_parts() -> None:
    model = make_model()
    assert find_blocks(model) == ["blocks.0", "blocks.1"]
    model.blocks[1].wide = model.blocks[0].wide
    assert find_blocks(model) == []
    layers = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ReLU(), nn.Linear(2, 2))
    assert find_blocks(layers) == ["0", "2"]
    assert find_blocks(nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2)])})) == ["a.0"]
    assert find_blocks(nn.Linear(2, 2)) == []


@pytest.fixture
def lone_mesh() -> Mesh:
    """A mesh that says that there are two ranks, and can do nothing."""
    return Mesh(LocalGroup(), Axes((1, 1, 2, 1, 1, 1)))


def test_what_cannot_be_sharded_is_refused(lone_mesh: Mesh) -> None:
    with pytest.raises(SettingsError, match="must be contiguous, but weight has strides"):
        shard_module(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), lone_mesh)
    with pytest.raises(SettingsError, match="module inside the model, but got 'layers'; there are: 0, 1"):
        shard_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), lone_mesh, blocks=["layers"])
    with pytest.raises(SettingsError, match=r"one dtype, but there are 0\.bias of torch\.float32, 1\.bias of"):
        shard_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), lone_mesh)


def test_one_rank_is_plain_training() -> None:
    mesh = Mesh(LocalGroup(), Layout(zero_stage=1).resolve(1))
    model = make_model()
    optimizer = make_optimizer(model)
    assert shard_module(model, mesh) is model
    assert shard_optimizer(optimizer, mesh) is optimizer is local_optimizer(optimizer)
    set_gradient_sync(model, False)
    reshard(model)
    model.loss().backward()
    weight = model.get_parameter("scale")
    assert local(weight) is weight is local_slice(weight, weight) is wrap(weight, weight)


def test_an_optimizer_with_state_is_not_shared(lone_mesh: Mesh) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    model.loss().backward()
    optimizer.step()
    with pytest.raises(SettingsError, match="must be new, but got one that keeps state of"):
        shard_optimizer(optimizer, lone_mesh)
