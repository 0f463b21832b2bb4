"""An optimizer's step where ranks share a worker's model."""

import pytest
import torch
from torch import nn

from paceline.comm import LocalGroup
from paceline.parallel.mesh import Mesh
from paceline.parallel.model_shard import ModelShard
from paceline.replica.optimizer_step import OptimizerStep
from paceline.topology.layout import Layout


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("axis", ["pipeline", "tensor", "sharded"])
def test_an_overflow_on_one_rank_of_a_worker_skips_the_step_on_all_of_them(axis, clip_norm):
    def rank(group):
        layout = Layout.model_validate({axis: 2})
        mesh = Mesh(group, layout.resolve(2))
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        step = OptimizerStep(
            optimizer, "fp16", clip_norm, ModelShard(mesh.group("data"), layout, mesh), {"weight": parameter}
        )
        skipped = []
        for factor in (torch.inf if group.rank == 1 else 0.1, 0.1):
            parameter.grad = torch.full((3,), step.loss_scale) * factor
            skipped.append(step.run(optimizer, 0, before=lambda _: None).skipped)
        return skipped, step.loss_scale, parameter.tolist()

    kept = pytest.approx([0.95] * 3)  # of the second step alone, which is within the bound
    assert LocalGroup.run(2, rank) == [([True, False], 2.0**15, kept)] * 2
