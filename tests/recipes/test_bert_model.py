import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.recipes.bert.model import Bert, BertBase, BertLarge, BidirectionalTransformer, sinusoids
from paceline.training.model import Model

SPEC = Spec(num_classes=50, input_shape=(24,))
TINY = Bert(width=32, num_layers=2, num_heads=4, dropout=0.0)
SEGMENT_VECTORS = 2
"""The published numbers of parameters count these, which a model without the next-sentence task has no use for."""


def build(settings: Bert = TINY) -> BidirectionalTransformer:
    torch.manual_seed(0)
    return settings.build(SPEC)


def tokens(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(1))


def test_it_is_built_by_name_for_the_datas_vocabulary() -> None:
    model = Model.model_validate({"name": "bert", "width": 32, "num_layers": 2}).build(SPEC)
    assert isinstance(model, BidirectionalTransformer)
    for length in (1, 7, 24):
        assert model(tokens(3, length)).shape == (3, length, 50)


@pytest.mark.parametrize("changed", [0, 5, 23])
def test_a_token_changes_all_logits(changed: int) -> None:
    model = build().double()
    one = tokens()
    other = one.clone()
    other[:, changed] = (one[:, changed] + 1) % 50
    with torch.no_grad():
        difference = (model(one) - model(other)).abs().amax(dim=(0, 2))
    assert difference.min() > 1e-6


def test_order_matters_by_the_positions_alone() -> None:
    model = build().double()
    swapped = [1, 0, *range(2, 24)]
    with torch.no_grad():
        assert (model(tokens()) - model(tokens()[:, swapped]))[:, -1].abs().max() > 1e-6
        model.positions.weight.zero_()
        torch.testing.assert_close(model(tokens())[:, swapped], model(tokens()[:, swapped]))


@pytest.mark.parametrize(
    ("settings", "published"), [(BertBase(), 109_514_298), (BertLarge(), 335_174_458)], ids=["base", "large"]
)
def test_the_number_of_parameters_is_that_of_the_paper(settings: Bert, published: int) -> None:
    with torch.device("meta"):
        model = settings.build(Spec(30_522, (512,)))
    assert sum(p.numel() for p in model.parameters()) == published - SEGMENT_VECTORS * settings.width


def test_it_is_torchs_post_norm_layers_between_embedding_and_head() -> None:
    model = build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        x = model.embedding_norm(model.embedding.weight[tokens()] + model.positions.weight[:24])
        for layer in model.layers:
            x = make_torchs(layer)(x)
        x = model.transform_norm(F.gelu(model.transform(x)))
        torch.testing.assert_close(model(tokens()), x @ model.embedding.weight.T + model.head.bias)


def make_torchs(layer: nn.Module) -> nn.Module:
    """Return torch's own layer with the weights of ours."""
    torchs = nn.TransformerEncoderLayer(
        32, 4, 128, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
    ).double()
    names = {
        "attention.project": "self_attn.out_proj",
        "attention_norm": "norm1",
        "mlp.expand": "linear1",
        "mlp.project": "linear2",
        "mlp_norm": "norm2",
    }
    ours = layer.state_dict()
    theirs = {f"{their}.{kind}": ours[f"{our}.{kind}"] for our, their in names.items() for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):  # torch has all queries first; we have query, key and value head by head
        by_head = ours[f"attention.query_key_value.{kind}"].unflatten(0, (4, 3, 8))
        theirs[f"self_attn.in_proj_{kind}"] = by_head.transpose(0, 1).flatten(0, 2)
    torchs.load_state_dict(theirs)
    return torchs.train()  # in evaluation torch takes a path of its own, which has no gradients


def test_every_parameter_gets_a_gradient() -> None:
    model = build()
    F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_the_state_is_its_weights_and_nothing_else() -> None:
    model = build()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert torch.equal(copy.deepcopy(model)(tokens()), model(tokens()))


def test_its_layers_are_the_model() -> None:
    model = build()
    x = tokens()
    for layer in model.pipeline_layers():
        x = layer.run(x)
    assert torch.equal(x, model(tokens()))
    owned = {name for layer in model.pipeline_layers() for name in layer.owns}
    assert all(any(name.startswith(f"{owner}.") for owner in owned) for name, _ in model.named_parameters())


@pytest.mark.parametrize(("width", "std"), [(768, 0.02), (192, 0.04)])
def test_weights_start_as_in_the_paper_at_its_width(width: int, std: float) -> None:
    model = Bert(width=width, num_layers=1, num_heads=4).build(SPEC)
    # A normal distribution that is cut off at two standard deviations has 0.88 of its own.
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name != "positions.weight":
            assert parameter.std().item() == pytest.approx(0.88 * std, rel=0.05)
            assert parameter.abs().max() <= 2 * std
    assert all(module.bias.abs().max() == 0 for module in model.modules() if isinstance(module, nn.Linear))
    loss = F.cross_entropy(model(tokens()).flatten(0, 1), tokens().roll(1).flatten())
    assert loss.item() == pytest.approx(math.log(50), abs=0.3)


def test_positions_start_as_sinusoids_as_large_as_tokens() -> None:
    model = Bert(width=192, num_layers=1, num_heads=4).build(SPEC)
    positions = model.positions.weight.detach()
    torch.testing.assert_close(positions.square().mean(dim=1), torch.full((24,), 0.04**2))
    products = positions @ positions.T
    for distance in range(-23, 24):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert products.argmax(dim=1).tolist() == [*range(24)]
    assert sinusoids(5, 7).shape == (5, 7)


def test_it_learns_to_fill_a_repeated_pattern() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pattern = torch.arange(8).repeat(3)[None]
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(60):
        is_asked = torch.rand(4, 24, generator=generator) < 0.2
        logits = model(pattern.expand(4, -1).masked_fill(is_asked, 49))
        loss = F.cross_entropy(logits[is_asked], pattern.expand(4, -1)[is_asked])
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


def test_dropout_is_of_training_only() -> None:
    model = build(TINY.model_copy(update={"dropout": 0.5}))
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), build().eval()(tokens()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 30, "num_heads": 4}, r"multiple of num_heads, but got 30 = 4 \* 7 \+ 2; choose width 32"),
        ({"num_layers": 0}, "num_layers"),
        ({"dropout": 1.0}, "dropout"),
        ({"feedforward_multiple": 0}, "feedforward_multiple"),
        ({"layers": 3}, "layers"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bert.model_validate(settings)


def test_data_that_is_no_text_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"must have 1 dim \(tokens\), but got the shape \(1, 16, 16\)"):
        Bert().build(Spec(num_classes=10, input_shape=(1, 16, 16)))
