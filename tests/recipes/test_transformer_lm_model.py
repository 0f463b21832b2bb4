import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.cli.overrides import apply_overrides
from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.recipes.transformer_lm import sizes  # noqa: F401  # registers them
from paceline.recipes.transformer_lm.model import Transformer, TransformerLM, rotary_tables, rotate
from paceline.training.model import Model

SPEC = Spec(num_classes=50, input_shape=(24,))
TINY = TransformerLM(width=32, num_layers=2, num_heads=4)


def build(settings: TransformerLM = TINY) -> Transformer:
    torch.manual_seed(0)
    return settings.build(SPEC)


def tokens(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(1))


def test_it_is_built_by_name_for_the_datas_vocabulary() -> None:
    model = Model.model_validate({"name": "transformer_lm", "width": 32, "num_layers": 2}).build(SPEC)
    assert isinstance(model, Transformer)
    for length in (1, 7, 24, 100):
        assert model(tokens(3, length)).shape == (3, length, 50)


@pytest.mark.parametrize("changed", [0, 5, 23])
def test_a_token_changes_its_own_and_later_logits_only(changed: int) -> None:
    model = build().double()
    one = tokens()
    other = one.clone()
    other[:, changed] = (one[:, changed] + 1) % 50
    with torch.no_grad():
        difference = (model(one) - model(other)).abs().amax(dim=(0, 2))
    assert difference[:changed].sum() == 0
    assert difference[changed:].min() > 1e-6


def test_a_prefix_has_the_logits_it_has_in_the_whole() -> None:
    model = build().double()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens())[:, :9], model(tokens()[:, :9]))


def test_rotated_products_depend_on_the_distance_only() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 16, dtype=torch.float64)
    tables = rotary_tables(torch.arange(40), 16, 100.0)
    queries, keys = (rotate(vector.expand(1, 1, 40, 16), tables)[0, 0] for vector in (query, key))
    scores = queries @ keys.T
    for distance in range(-39, 40):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)  # float32 angles
    assert torch.unique(scores[:, 0].round(decimals=4)).numel() == 40
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(40))
    torch.testing.assert_close(queries[0], query)


def test_rotation_turns_each_pair_by_its_own_angle() -> None:
    vectors = torch.tensor([1.0, 1, 0, 0]).expand(1, 1, 6, 4)
    turned = rotate(vectors, rotary_tables(torch.arange(6), 4, 100.0))[0, 0, 5]
    expected = [math.cos(5), math.cos(0.5), math.sin(5), math.sin(0.5)]
    torch.testing.assert_close(turned, torch.tensor(expected))


def test_order_matters_to_a_single_layer() -> None:
    model = build(TINY.model_copy(update={"num_layers": 1})).double()  # more could tell it from the causal mask
    with torch.no_grad():
        one, swapped = model(tokens()), model(tokens()[:, [1, 0, *range(2, 24)]])
    assert (one - swapped)[:, -1].abs().max() > 1e-6


def test_one_matrix_serves_input_and_output() -> None:
    model = build()
    assert [tuple(p.shape) for p in model.parameters()].count((50, 32)) == 1
    model(tokens()).sum().backward()
    unused = [token for token in range(50) if token not in tokens()]
    assert unused
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight.grad[unused].abs().min(dim=1).values.min() > 0, "the output's gradient"
    with torch.no_grad():
        model.embedding.weight.zero_()
        assert model(tokens()).abs().max() == 0


def test_every_parameter_gets_a_gradient() -> None:
    model = build()
    F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_the_state_is_its_weights_and_nothing_else() -> None:
    model = build()
    before = model(tokens())
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    other = TINY.build(SPEC)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens()), before)
    assert torch.equal(copy.deepcopy(model)(tokens()), before)


def test_weights_start_small_and_branch_ends_smaller() -> None:
    model = TransformerLM(width=256, num_layers=8, num_heads=4).build(SPEC)
    layer = model.layers[3]
    for module in (model.embedding, layer.attention.query_key_value, layer.mlp.gate, layer.mlp.expand):
        assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for module in (layer.attention.project, layer.mlp.project):
        assert module.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    loss = F.cross_entropy(model(tokens()).flatten(0, 1), tokens().roll(1).flatten())
    assert loss.item() == pytest.approx(math.log(50), abs=0.15)


def test_the_number_of_parameters() -> None:
    with torch.device("meta"):
        model = TransformerLM(width=384, num_layers=7, num_heads=6).build(Spec(256, (128,)))
    per_layer = 2 * 384 + 4 * 384**2 + 3 * 384 * 1024
    assert sum(p.numel() for p in model.parameters()) == 256 * 384 + 7 * per_layer + 384
    assert not any(isinstance(module, nn.Linear) and module.bias is not None for module in model.modules())


@pytest.mark.parametrize(
    ("size", "millions"),
    [("124m", 123.6), ("350m", 353.3), ("760m", 756.7), ("1b", 1009.3)],
)
def test_named_sizes_have_their_number_of_parameters(size: str, millions: float) -> None:
    settings = Model.model_validate({"name": f"transformer_lm_{size}"})
    assert isinstance(settings, TransformerLM)
    with torch.device("meta"):
        model = settings.build(Spec(50_257, (1024,)))
    width, num_layers = settings.width, settings.num_layers
    hidden = 8 * round(width / 3)  # two thirds of four times the width, in steps of eight
    closed_form = 50_257 * width + num_layers * (4 * width**2 + 3 * width * hidden + 2 * width) + width
    assert sum(p.numel() for p in model.parameters()) == closed_form
    assert closed_form / 1e6 == pytest.approx(millions, abs=0.05)
    smaller = apply_overrides(settings, [("num_layers", "2")])
    assert (smaller.width, smaller.num_layers, smaller.name) == (width, 2, f"transformer_lm_{size}")


def test_it_learns_a_repeated_pattern() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pattern = torch.arange(8).repeat(4)[None]
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(model(pattern[:, :-1]).flatten(0, 1), pattern[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3.5
    assert losses[-1] < 0.1


def test_it_runs_under_autocast() -> None:
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens())
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(tokens()), rtol=0, atol=0.02)
    logits.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_it_can_be_all_bfloat16() -> None:
    logits = build().to(torch.bfloat16)(tokens())
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), build()(tokens()), rtol=0, atol=0.02)


def test_dropout_is_of_training_only() -> None:
    model = build(TINY.model_copy(update={"dropout": 0.5}))
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))
    assert torch.equal(model(tokens()), build().eval()(tokens()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 30, "num_heads": 4}, r"multiple of num_heads, but got 30 = 4 \* 7 \+ 2; choose width 32"),
        ({"width": 12, "num_heads": 4}, r"must be even .* but got 12 / 4 = 3; choose width 16"),
        ({"num_layers": 0}, "num_layers"),
        ({"dropout": 1.0}, "dropout"),
        ({"rotary_base": 1.0}, "rotary_base"),
        ({"feedforward_multiple": 0}, "feedforward_multiple"),
        ({"layers": 3}, "layers"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerLM.model_validate(settings)


def test_a_bad_width_is_a_settings_error_inside() -> None:
    with pytest.raises(ValueError, match="width") as caught:
        TransformerLM(width=30, num_heads=4)
    assert isinstance(caught.value.errors()[0]["ctx"]["error"], SettingsError)  # type: ignore[attr-defined]
