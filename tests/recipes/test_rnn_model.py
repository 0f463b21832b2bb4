import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.recipes.rnn.model import RNN, RecurrentClassifier
from paceline.training.model import Model

CELLS = ("lstm", "gru")
SPEC = Spec(num_classes=5, input_shape=(12, 6))


def build(cell: str, spec: Spec = SPEC, **settings: object) -> RecurrentClassifier:
    torch.manual_seed(0)
    module = Model.model_validate({"name": "rnn", "cell": cell, "width": 16, **settings}).build(spec)
    assert isinstance(module, RecurrentClassifier)
    return module


def sequences(batch: int = 4) -> Tensor:
    return torch.randn(batch, 12, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cell", CELLS)
def test_an_image_is_read_row_by_row_from_the_top(cell: str) -> None:
    model = build(cell, Spec(num_classes=5, input_shape=(2, 12, 3)))
    images = torch.randn(4, 2, 12, 3)
    rows = torch.cat([images[:, 0], images[:, 1]], dim=-1)
    assert model(images).shape == (4, 5)
    assert torch.equal(model(images), build(cell)(rows))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_every_step_and_their_order_count(cell: str, num_layers: int) -> None:
    model = build(cell, num_layers=num_layers)
    logits = model(sequences())
    for step in range(12):
        other = sequences()
        other[:, step] += 1
        assert (model(other) - logits).abs().amax(dim=1).min() > 1e-6
    assert not torch.allclose(model(sequences().flip(1)), logits, atol=1e-4)


@pytest.mark.parametrize("cell", CELLS)
def test_it_is_torchs_cell_run_step_by_step(cell: str) -> None:
    model = build(cell)
    alone = (nn.LSTMCell if cell == "lstm" else nn.GRUCell)(6, 16)
    alone.load_state_dict({name.removesuffix("_l0"): value for name, value in model.recurrent.state_dict().items()})
    state = None
    for step in range(12):
        state = alone(sequences()[:, step], state)
    said = state[0] if isinstance(state, tuple) else state
    torch.testing.assert_close(model(sequences()), model.head(said))


def test_an_lstm_starts_by_remembering() -> None:
    started = build("lstm", num_layers=2)
    torch.manual_seed(0)
    plain = nn.LSTM(6, 16, 2)
    for layer in range(2):
        added = started.recurrent.get_parameter(f"bias_ih_l{layer}") - plain.get_parameter(f"bias_ih_l{layer}")
        expected = torch.zeros(4, 16)
        expected[1] = 1  # the forget gate
        torch.testing.assert_close(added.view(4, 16), expected)


@pytest.mark.parametrize(("cell", "num_gates"), [("lstm", 4), ("gru", 3)])
def test_the_number_of_parameters(cell: str, num_gates: int) -> None:
    with torch.device("meta"):
        model = build(cell, width=20, num_layers=2)
    first, second = 20 * (6 + 20 + 2), 20 * (20 + 20 + 2)  # torch has two biases a gate
    assert sum(p.numel() for p in model.parameters()) == num_gates * (first + second) + 20 * 5 + 5


@pytest.mark.parametrize("cell", CELLS)
def test_it_learns_what_stood_first(cell: str) -> None:
    """The label is in the first of twelve steps: it has to be carried to the last."""
    model = build(cell)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x = sequences(32)
    labels = x[:, 0, :5].argmax(-1)
    losses = []
    for _ in range(100):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.3
    assert losses[-1] < 0.2


@pytest.mark.parametrize("cell", CELLS)
def test_it_runs_under_autocast(cell: str) -> None:
    model = build(cell)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(sequences())
    torch.testing.assert_close(logits.float(), model(sequences()), rtol=0, atol=0.02)
    logits.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("num_layers", [1, 2])
def test_dropout_is_of_training_only(num_layers: int) -> None:
    model = build("gru", dropout=0.5, num_layers=num_layers)
    assert not torch.equal(model(sequences()), model(sequences()))
    model.eval()
    assert torch.equal(model(sequences()), build("gru", num_layers=num_layers).eval()(sequences()))


@pytest.mark.parametrize("settings", [{"cell": "rnn"}, {"width": 0}, {"num_layers": 0}, {"dropout": 1}, {"depth": 3}])
def test_settings_that_cannot_work_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        RNN.model_validate(settings)


def test_data_that_is_no_sequence_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"must have 2 dims .* or 3 .*, but got the shape \(128,\)"):
        RNN().build(Spec(num_classes=256, input_shape=(128,)))
