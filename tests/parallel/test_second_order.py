"""Transforms of torch.func over layouts: exact where nothing is exchanged in the model, else refused in a sentence."""

import pytest
import torch
from torch import nn

from paceline.comm import join
from paceline.errors import SettingsError
from paceline.parallel import parallelize
from paceline.parallel.parallelize import find_shard
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout


def adapt(model: nn.Module, x: torch.Tensor) -> float:
    """Return an output after a step of gradient descent that is not kept, as in meta-learning."""
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(model(x).square().sum(), list(parameters.values()))
    adapted = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
    return torch.func.functional_call(model, adapted, (x,)).sum().item()


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def adapt_split() -> float:
    x = torch.ones(2, 4).double()
    with join() as group:
        plan = {"0": "columns", "2": "rows"}
        return adapt(parallelize(make_layers(), Layout(tensor=2), group=group, sample=x, tensor_plan=plan), x)


def test_parameters_that_a_loop_has_computed_are_read_as_those_of_the_model() -> None:
    results = run_processes(2, adapt_split, timeout_s=50)
    check_exits(results)
    expected = adapt(make_layers(), torch.ones(2, 4).double())
    assert [result.value for result in results] == pytest.approx([expected] * 2, abs=1e-12)


def transform() -> list[str]:
    said = []
    x = torch.ones(2, 4)
    with join() as group:
        for layout in (Layout(sharded=2), Layout(tensor=2), Layout(sharded=2, zero_stage=1)):
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
            module = parallelize(model, layout, group=group, sample=x, tensor_plan={"0": "columns", "2": "rows"})
            try:
                torch.func.vjp(module, x)
                said.append("")
            except SettingsError as error:
                said.append(str(error))
            find_shard(module, group).close()
    return said


def test_transforms_are_refused_by_the_name_of_the_axis() -> None:
    results = run_processes(2, transform, timeout_s=50)
    check_exits(results)
    for result in results:
        sharded, tensor, first_stage = result.value
        assert "inside torch.func (vjp, jvp, grad) over the sharded axis" in sharded
        assert "or set Layout(zero_stage=1)" in sharded
        assert "over the tensor axis" in tensor
        assert first_stage == ""
