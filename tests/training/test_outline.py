"""Models whose memory is estimated though they cannot be built without contents, or look at what they hold."""

import pytest
import torch
from test_memory_estimate import CPU, TEXT, make_run
from torch import nn

from paceline.training.memory_fit import check_fit, estimate
from paceline.training.model import FunctionModel
from paceline.training.rehearsal import check_shards, outline

BUILT = []
"""Devices on which weights were read."""


def run_of(function, **arguments):
    return make_run(model=FunctionModel(path=f"{__file__}:{function}", arguments=arguments))


class TiedModel(nn.Module):
    """A language model whose head is its embedding, with a tensor that is neither parameter nor buffer."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.scales = {"input": torch.linspace(1, 2, width)}

    def forward(self, tokens):
        return self.head(self.embedding(tokens) * self.scales["input"])


def make_tied(width=32):
    return TiedModel(width)


def make_pretrained(width=32):
    """Do as `from_pretrained`, which refuses to build on the meta device."""
    module = TiedModel(width)
    BUILT.append(module.head.weight.device.type)
    if module.head.weight.is_meta:
        raise RuntimeError("weights cannot be read to where there are none")
    return module


def make_truncated(width=32):
    module = TiedModel(width)
    nn.init.trunc_normal_(module.embedding.weight, std=0.5, a=-0.1, b=0.1)
    nn.init.trunc_normal_(module.embedding.weight, std=0.02)
    return module


def make_impossible():
    raise FileNotFoundError("there are no such weights")


def test_a_model_that_reads_weights_is_built_once_and_its_memory_is_known():
    BUILT.clear()
    run = run_of("make_pretrained", width=48)
    assert estimate(run, TEXT, 2, CPU) == estimate(run_of("make_tied", width=48), TEXT, 2, CPU)
    room = estimate(run, TEXT, 2, CPU).peak_bytes
    assert check_fit(run, TEXT, 2, CPU, room).bytes_of["parameters"] == 4 * 64 * 48, "what is tied counts once"
    with pytest.raises(ValueError, match="must hold a step"):
        check_fit(run, TEXT, 2, CPU, room // 2)
    assert BUILT == ["meta", "cpu"]


def test_an_outline_keeps_names_shapes_and_ties():
    made, real = outline(run_of("make_pretrained").model, TEXT), make_tied()
    assert {name: tensor.shape for name, tensor in made.state_dict().items()} == {
        name: tensor.shape for name, tensor in real.state_dict().items()
    }
    assert made.head.weight is made.embedding.weight
    assert made.head.weight.is_meta
    assert isinstance(made.head.weight, nn.Parameter)


@pytest.mark.timeout(20)
def test_weights_that_are_drawn_until_they_suit_are_not_waited_for():
    """Torch's truncated normal draws again until all values are inside, which those without contents never are."""
    run = run_of("make_truncated")
    assert estimate(run, TEXT, 2, CPU) == estimate(run_of("make_tied"), TEXT, 2, CPU)


def test_what_building_raises_is_left_to_the_workers_to_tell():
    with pytest.warns(UserWarning, match="memory was not checked: .*FileNotFoundError: .*no such weights"):
        assert check_fit(run_of("make_impossible"), TEXT, 2, CPU, 10**9) is None
    run = run_of("make_impossible")
    layout = run.layout.model_copy(update={"sharded": 2})
    check_shards(run.model_copy(update={"layout": layout}), TEXT)
