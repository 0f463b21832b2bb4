"""What a run of a part of a model leaves behind."""

import gc
import weakref

import torch
from torch import Tensor, nn

from paceline.parallel.pipeline.traced import find_layers


class Branching(nn.Module):
    """A model that is no plain sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.embedding(x)
        for layer in self.layers:
            x = layer(x) + first
        return x


def test_the_results_of_a_micro_batch_are_freed_without_a_garbage_collection() -> None:
    model = Branching()
    layers = find_layers(model, (), torch.randn(2, 4))
    made: list[weakref.ref[Tensor]] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        value = (torch.randn(2, 4),)
        for layer in layers:
            value = layer.run(value)
        assert len(made) == 3
        del value
        assert [one() for one in made] == [None] * 3
    finally:
        gc.enable()
