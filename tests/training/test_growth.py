"""A model that grows: where its tensors come from, what it computes, and what its optimizer knows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.data import Spec
from paceline.errors import SettingsError
from paceline.recipes.transformer_lm.model import TransformerLM
from paceline.training.growth import Growth, find_origin, grow_module, grow_optimizer
from paceline.training.model import LayerStack

SMALL = TransformerLM(width=8, num_layers=2, num_heads=2)
SPEC = Spec(num_classes=11, input_shape=(6,))
TOKENS = torch.arange(24).reshape(4, 6) % 11


def train_a_little(module, optimizer, num_steps=3):
    for _ in range(num_steps):
        F.cross_entropy(module(TOKENS).flatten(0, 1), (TOKENS * 3 % 11).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def grow(method, num_layers=4):
    """Return a trained module and its optimizer, and those that they have grown into."""
    torch.manual_seed(0)
    old, new = SMALL.build(SPEC), SMALL.with_depth(num_layers).build(SPEC)
    old_optimizer, new_optimizer = (torch.optim.AdamW(module.parameters(), lr=0.01) for module in (old, new))
    train_a_little(old, old_optimizer)
    grow_module(old, new, SMALL.layer_stack, method)
    grow_optimizer((old, old_optimizer), (new, new_optimizer), SMALL.layer_stack, method)
    return (old, old_optimizer), (new, new_optimizer)


@pytest.mark.parametrize("num_layers", [3, 4, 7])
def test_identity_growth_keeps_the_function(num_layers):
    (old, _), (new, _) = grow("identity", num_layers)
    assert torch.equal(new(TOKENS), old(TOKENS))


def test_identity_growth_goes_on_learning_in_the_new_layers():
    (old, _), (new, optimizer) = grow("identity")
    train_a_little(new, optimizer)
    assert all(new.layers[2].mlp.project.weight.abs().amax(1) > 0)
    assert not torch.equal(new(TOKENS), old(TOKENS))


def test_stacking_puts_the_layers_on_themselves():
    (old, _), (new, _) = grow("stack", 5)
    for place, layer in enumerate(new.layers):
        source = old.layers[place % 2].state_dict()
        assert all(torch.equal(tensor, source[name]) for name, tensor in layer.state_dict().items())
    assert torch.equal(new.embedding.weight, old.embedding.weight)


@pytest.mark.parametrize("method", ["stack", "identity"])
def test_optimizer_state_is_carried_over(method):
    (old, old_optimizer), (new, new_optimizer) = grow(method)
    before = {name: old_optimizer.state[parameter] for name, parameter in old.named_parameters()}
    after = {name: new_optimizer.state.get(parameter) for name, parameter in new.named_parameters()}
    for name, state in after.items():
        origin = find_origin(name, SMALL.layer_stack)
        if method == "identity" and origin.is_new:
            assert state is None
            continue
        assert state.keys() == before[origin.name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(state[key], before[origin.name][key]) for key in state)
        assert state["exp_avg"].abs().sum() > 0
    tensors = [tensor for state in after.values() if state for tensor in state.values()]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors), "layers must not share their state"
    train_a_little(new, new_optimizer)  # the optimizer can go on from it
    steps = {float(new_optimizer.state[parameter]["step"]) for parameter in new.parameters()}
    assert steps == ({6.0} if method == "stack" else {3.0, 6.0})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("body.layers.1.norm.weight", ("body.layers.1.norm.weight", False)),
        ("body.layers.2.norm.weight", ("body.layers.2.norm.weight", False)),
        ("body.layers.3.norm.weight", ("body.layers.0.norm.weight", True)),
        ("body.layers.10.norm.weight", ("body.layers.1.norm.weight", True)),
        ("head.layers.10.weight", ("head.layers.10.weight", False)),
        ("body.layers_norm.weight", ("body.layers_norm.weight", False)),
    ],
)
def test_where_tensors_come_from(name, expected):
    assert find_origin(name, LayerStack(3, "body.layers", ())) == expected


def test_depths_by_step():
    doubling, given = Growth(steps=(4, 9)), Growth(steps=(4, 9), depths=(3, 8))
    steps = (0, 3, 4, 8, 9, 100)
    assert [doubling.depth_at(step, 2) for step in steps] == [2, 2, 4, 4, 8, 8]
    assert [given.depth_at(step, 2) for step in steps] == [2, 2, 3, 3, 8, 8]
    assert Growth().depth_at(100, 2) == 2


def test_models_that_differ_in_more_than_layers_are_refused():
    old, wider = SMALL.build(SPEC), SMALL.model_copy(update={"width": 16, "num_layers": 4}).build(SPEC)
    with pytest.raises(SettingsError, match=r"differ in its number of layers only, but embedding\.weight has shape"):
        grow_module(old, wider, SMALL.layer_stack, "stack")
    more = SMALL.build(SPEC)
    more.extra = nn.Linear(2, 2)
    with pytest.raises(SettingsError, match=r"extra\.weight is missing"):
        grow_module(old, more, SMALL.layer_stack, "stack")
