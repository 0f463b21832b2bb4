"""Errors of torch about a part of a parameter beside plain tensors are told by whose they are."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.errors import SettingsError
from paceline.parallel.number_reads import refuse_reads_of_parts
from paceline.parallel.parameter_use import ParameterUse
from paceline.topology.layout import Layout


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.inner = nn.Linear(4, 4), nn.Module()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head.weight)


@pytest.fixture
def model() -> object:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    outer = nn.ModuleDict({"part": Reads()})
    head = outer["part"].head
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Replicate()]))
    yield outer
    dist.destroy_process_group()


def explain(model: nn.ModuleDict, function: object, layout: Layout, *, match: str = "mixed") -> str | None:
    use = ParameterUse(model, layout)
    with pytest.raises(RuntimeError, match=match) as raised:
        function()
    found = use.explain(raised.value)
    return None if found is None else str(found)


def test_a_mixed_error_is_told_of_the_loss_the_model_or_nobody(model: nn.ModuleDict) -> None:
    x, tensor, sharded = torch.ones(2, 4), Layout(tensor=2), Layout(sharded=2)
    weight = model["part"].head.weight
    said = explain(model, lambda: F.linear(x, weight), tensor)
    assert said is not None
    assert "a loss must be computed" in said
    assert "part.head.weight" in said
    said = explain(model, lambda: model["part"](x), tensor)
    assert said is not None
    assert "part.forward combines part.head.weight with other tensors; leave the module of part.head.weight" in said
    said = explain(model, lambda: model["part"](x), sharded)
    assert said is not None
    assert "give parallelize a sample" in said
    norm = weight.detach().norm()
    said = explain(model, lambda: x * norm, tensor)
    assert said is not None
    assert "combines values of parameters, such as their norms, with tensors of its own" in said
    said = explain(model, lambda: weight.detach().numpy(), tensor, match="tensor subclasses")
    assert said is not None
    assert said.startswith("an operation on part.head.weight must be one that torch knows for parts of tensors, which")
    assert "over tensor(2), but it says '.numpy() is not supported for tensor subclasses.'; call it with x.full" in said
    foreign = distribute_tensor(torch.ones(4, 4), weight.device_mesh, [Replicate()])
    assert explain(nn.ModuleDict({"part": nn.Linear(4, 4)}), lambda: F.linear(x, foreign), tensor) is None


class Measuring(torch.optim.Optimizer):
    """An optimizer that reads a number of a whole parameter, as Adafactor does."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:
        float(self.param_groups[0]["params"][0].norm())


def test_an_optimizer_that_reads_whole_parameters_is_named() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sharded",))
        weight = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False))
        refuse_reads_of_parts()
        with pytest.raises(SettingsError, match=r"an optimizer must .* but Measuring reads .* over sharded\(2\)"):
            Measuring([weight]).step()
        with pytest.raises(SettingsError, match=r"write x\.full_tensor"):
            float(weight.norm())
    finally:
        dist.destroy_process_group()
