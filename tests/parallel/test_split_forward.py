"""Foreign models on parts of sequences: what would train another model is refused, and nothing else is."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm import join
from paceline.errors import SettingsError
from paceline.parallel.context import split_batch
from paceline.parallel.parallelize import find_shard, parallelize
from paceline.testing.processes import run_processes
from paceline.topology.layout import Layout

WIDTH = 12
NUM_TOKENS = 8
LAYOUT = Layout(context=2)


class Attending(nn.Module):
    """Causal attention on tokens, and what `kind` adds to it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(24, WIDTH)
        self.table = nn.Embedding(32, WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Identity()
        self.drop = nn.Dropout(0.5)
        self.gate = nn.Parameter(torch.zeros(1))
        self.bias = nn.Parameter(torch.zeros(32))
        for parameter in self.mix.parameters():
            nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return features of each token."""
        x: Tensor = self.embed(tokens)
        query, key, value = self.project(x)[:, None].chunk(3, dim=-1)
        dropout_p = 0.5 if self.training and self.kind == "dropout" else 0.0
        match self.kind:
            case "learned mask" | "window":
                count = torch.ones(tokens.shape[1]).cumsum(0).long()  # of a rank's tokens, wherever these are
                distance = count[:, None] - count
                mask = self.bias[distance.clamp(min=0)] if self.kind == "learned mask" else torch.zeros(1)
                hidden = (distance < 0) | ((distance > 9) & (self.kind == "window"))
                x = x + F.scaled_dot_product_attention(query, key, value, mask.masked_fill(hidden, -1e9))[:, 0]
            case "wide values":
                x = x + F.scaled_dot_product_attention(query[..., :4], key[..., :4], value, is_causal=True)[:, 0]
            case _:
                x = x + F.scaled_dot_product_attention(query, key, value, None, dropout_p, True)[:, 0]
        match self.kind:
            case "zero projection":
                x = x + self.mix(x.cumsum(1))
            case "zero gate":
                x = x + self.gate * x.mean(1, keepdim=True)
            case "training":
                x = x + 0.5 * x.mean(1, keepdim=True) if self.training else x
            case "own positions":
                x = x + self.table(torch.ones_like(tokens).cumsum(1))
            case "pooled":
                x = x.mean(1)
            case "in place":
                y = self.act(x * 1.0)
                x = x + y.add_(1.0)
            case "dropout":
                x = self.drop(x)
            case "noise":
                x = x + torch.rand_like(x) if self.training else x
        return x


class Packing(Attending):
    """Attention, with the arguments of transformers."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None) -> Tensor:
        """Return features of each token, where positions are told."""
        x: Tensor = super().forward(input_ids) + self.table(position_ids)
        return x


REFUSED = {
    "zero projection": "but mix has another output with split sequences",
    "zero gate": "but Attending has another output with split sequences",
    "learned mask": "but it adds numbers",
    "training": r"but Attending has another output with split sequences, by [0-9.]+ in training",
    "own positions": r"a module must look up .* positions by the argument position_ids .* but table has another output",
    "pooled": r"but Attending has an output without a dim of tokens, \(2, 12\)",
}
ACCEPTED = ["plain", "wide values", "in place", "dropout", "noise"]


def draw(num_tokens: int = NUM_TOKENS) -> Tensor:
    return torch.randint(24, (2, num_tokens), generator=torch.Generator().manual_seed(0))


def run_model(model: nn.Module, kind: str, group: Any) -> str:
    """Return what is said of a model, or whether its outputs and values are those of the whole one."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model.eval()(draw()).detach()
    model.train()
    try:
        model = parallelize(model, LAYOUT, group=group, sample=draw())
    except SettingsError as error:
        return str(error)
    mesh = find_shard(model, group).mesh
    assert mesh is not None
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    gap = (model.eval()(split_batch(draw(), mesh)) - split_batch(expected, mesh)).abs().max()
    said = "exact" if gap < 1e-6 else f"wrong by {float(gap)}"
    if kind == "window":
        try:
            model(split_batch(draw(16), mesh))
        except SettingsError as error:
            said = f"{said}; {error}"
    find_shard(model, group).close()
    return said


def say_of_packed(group: Any) -> str:
    """Return what is said of a batch with several texts in a sequence."""
    data = {"input_ids": draw(), "position_ids": torch.arange(NUM_TOKENS).repeat(2, 1)}
    model = parallelize(Packing("plain"), LAYOUT, group=group, sample=data)
    mesh = find_shard(model, group).mesh
    assert mesh is not None
    model(**split_batch(data, mesh))
    restarted = {**data, "position_ids": torch.arange(NUM_TOKENS).repeat(2, 1) % 5}
    with pytest.raises(SettingsError) as raised:
        model(**split_batch(restarted, mesh))
    model(**split_batch({**restarted, "attention_mask": torch.ones_like(data["input_ids"])}, mesh))
    find_shard(model, group).close()
    return str(raised.value)


def on_two() -> Any:
    torch.set_num_threads(1)
    with join() as group:
        said = {}
        for kind in (*REFUSED, *ACCEPTED, "window"):
            torch.manual_seed(1)
            said[kind] = run_model(Attending(kind), kind, group)
        return {**said, "packed": say_of_packed(group)}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    results = run_processes(2, on_two)
    assert [result.exit_code for result in results] == [0, 0], [result.output for result in results]
    said: dict[str, str] = results[0].value
    return said


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_would_train_otherwise_is_refused(said: dict[str, str], kind: str) -> None:
    with pytest.raises(SettingsError, match=REFUSED[kind]):
        raise SettingsError(said[kind])


@pytest.mark.parametrize("kind", ACCEPTED)
def test_a_model_that_does_the_same_on_parts_is_split(said: dict[str, str], kind: str) -> None:
    assert said[kind] == "exact"


def test_sequences_longer_than_the_samples_are_refused_since_a_window_may_begin_there(said: dict[str, str]) -> None:
    assert said["window"].startswith("exact; sequences must be no longer than the sample's for a context axis")
    assert "got 8 tokens a rank, and 4 of the sample" in said["window"]


def test_several_texts_in_a_sequence_are_refused_unless_a_mask_is_given(said: dict[str, str]) -> None:
    assert said["packed"].startswith("position_ids must count all tokens of a sequence for a context axis")
