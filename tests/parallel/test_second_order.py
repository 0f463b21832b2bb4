"""Transforms of torch.func over layouts: exact where nothing is exchanged in the model, else refused in a sentence."""

import torch
from torch import nn

from paceline.comm import join
from paceline.errors import SettingsError
from paceline.parallel import parallelize
from paceline.parallel.parallelize import find_shard
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout


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
