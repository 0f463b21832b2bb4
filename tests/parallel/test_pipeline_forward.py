"""The order of messages of a forward pass through stages, on which two ranks that send to each other depend."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paceline.parallel.pipeline.forward import ForwardPass
from paceline.parallel.pipeline.layers import list_layers
from paceline.parallel.pipeline.stages import Stage

TAKEN, GIVEN = "take", "give"


@pytest.mark.parametrize(
    ("num_stages", "mine", "expected"),
    [
        (2, [0], [(GIVEN, 1, 0), (GIVEN, 1, 1)]),
        (3, [1], [(TAKEN, 1, 0), (GIVEN, 2, 0), (TAKEN, 1, 1), (GIVEN, 2, 1)]),
        # A rank of two stages takes all inputs of one before it gives, as the rank does that it gives to.
        (4, [0, 2], [(GIVEN, 1, 0), (GIVEN, 1, 1), (TAKEN, 2, 0), (TAKEN, 2, 1), (GIVEN, 3, 0), (GIVEN, 3, 1)]),
        (4, [1, 3], [(TAKEN, 1, 0), (TAKEN, 1, 1), (GIVEN, 2, 0), (GIVEN, 2, 1), (TAKEN, 3, 0), (TAKEN, 3, 1)]),
    ],
)
def test_ranks_of_several_stages_take_before_they_give(monkeypatch, num_stages, mine, expected):
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda _: 3 if num_stages == 3 else 2)
    done = []

    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(num_stages)))
    layers = list_layers(model)
    stages = [Stage(model, [layers[index]], index, splits_backward=False) for index in mine]

    def take(_, stage, micro_batch, source):
        done.append((TAKEN, stage, micro_batch))
        return torch.zeros(1, 2), (True,)

    monkeypatch.setattr(ForwardPass, "take", take)
    monkeypatch.setattr(ForwardPass, "give", lambda _, value, gives, stage, i: done.append((GIVEN, stage, i)))
    passing = ForwardPass(stages, num_stages, SimpleNamespace(), None)
    outputs = passing.run([torch.zeros(1, 2)] * 2)
    assert done == expected
    assert len(outputs) == (2 if num_stages - 1 in mine else 0)
