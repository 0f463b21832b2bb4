"""A model that grows: where its tensors come from, what it computes, and what its optimizer knows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.data import Spec
from paceline.errors import SettingsError
from paceline.recipes.transformer_lm.model import TransformerLM
from paceline.training.growth import Growth, find_origin, grow_module, grow_optimizer
from paceline.training.model import LayerStack, ModelSize, UnitWidth
from paceline.training.widening import widen_module, widen_optimizer

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


def widen(width=24, dtype=torch.float32, optimizer=torch.optim.AdamW):
    """Return a trained module and its optimizer, and those that they have widened into."""
    torch.manual_seed(0)
    old, new = SMALL.build(SPEC).to(dtype), SMALL.with_width(width).build(SPEC).to(dtype)
    old_optimizer, new_optimizer = (optimizer(module.parameters(), lr=0.01) for module in (old, new))
    train_a_little(old, old_optimizer)
    widen_module(old, new, SMALL.unit_width, seed=3)
    widen_optimizer((old, old_optimizer), (new, new_optimizer))
    return (old, old_optimizer), (new, new_optimizer)


@pytest.mark.parametrize("width", [16, 24, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_widening_keeps_the_function(width, dtype, tolerance):
    (old, _), (new, _) = widen(width, dtype)
    assert new.embedding.weight.shape[1] == width
    expected = old(TOKENS).detach()
    torch.testing.assert_close(new(TOKENS).detach(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_copies_of_a_unit_part_in_training():
    """Equal parts of what reads them would give the copies equal gradients for ever."""
    _, (new, optimizer) = widen(16)
    train_a_little(new, optimizer, 5)
    for name, parameter in new.named_parameters():
        first, second = parameter.chunk(2, dim=-1)
        assert not torch.allclose(first, second, atol=1e-4), name
    first, second = new.layers[0].mlp.gate.weight[:16, :8], new.layers[0].mlp.gate.weight[24:40, :8]
    assert (first - second).abs().max() > 1e-4


def test_a_wider_model_has_the_moments_of_the_copied_units_and_goes_on():
    (old, old_optimizer), (new, new_optimizer) = widen(16)
    before, after = old_optimizer.state[old.embedding.weight], new_optimizer.state[new.embedding.weight]
    assert torch.equal(after["exp_avg"], before["exp_avg"].repeat(1, 2))
    assert after["step"] == before["step"] == 3
    train_a_little(new, new_optimizer)
    assert all(float(new_optimizer.state[parameter]["step"]) == 6 for parameter in new.parameters())
    assert after["step"] is not before["step"]


def test_moments_of_other_shapes_begin_anew():
    (old, old_optimizer), (new, new_optimizer) = widen(16, optimizer=torch.optim.Adafactor)
    assert old.embedding.weight in old_optimizer.state
    assert new.embedding.weight not in new_optimizer.state
    assert new.norm.weight in new_optimizer.state
    train_a_little(new, new_optimizer)


def test_convolutions_with_batch_norm_widen_by_any_number():
    def build(width):
        return nn.Sequential(
            nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(2), nn.AdaptiveAvgPool1d(1),
            nn.Flatten(), nn.Linear(width, 2),
        )  # fmt: skip

    torch.manual_seed(0)
    old, new, pictures = build(4), build(7), torch.randn(3, 1, 6, 6)
    old(pictures)
    widen_module(old, new, UnitWidth(4, ()), seed=0)
    for mode in (True, False):
        torch.testing.assert_close(new.train(mode)(pictures), old.train(mode)(pictures), rtol=1e-6, atol=1e-6)


def test_models_that_differ_in_more_than_width_are_refused():
    old, deeper = SMALL.build(SPEC), SMALL.with_depth(3).build(SPEC)
    with pytest.raises(SettingsError, match=r"differ in its width only, but layers\.2\..* had none"):
        widen_module(old, deeper, SMALL.unit_width, seed=0)
    with pytest.raises(SettingsError, match=r"differ in its width only, but embedding\.weight has shape \(11, 8\)"):
        widen_module(SMALL.with_width(16).build(SPEC), old, SMALL.unit_width, seed=0)


def test_sizes_by_step():
    first = ModelSize(num_layers=2, width=8)
    wider = Growth(steps=(4, 9), widths=(16, 32))
    assert [wider.size_at(step, first) for step in (3, 4, 9)] == [first, ModelSize(2, 16), ModelSize(2, 32)]
    assert Growth(steps=(4,)).size_at(4, first) == ModelSize(4, 8)
    assert Growth().size_at(4, first) == first
