"""Foreign models on parts of sequences: what would train another model is refused, and nothing else is."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm import join
from paceline.errors import SettingsError
from paceline.parallel.context import split_batch
from paceline.parallel.parallelize import find_shard, parallelize
from paceline.parallel.trial import restored
from paceline.testing.processes import check_exits, run_processes
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
        self.whole = nn.Parameter(torch.randn(NUM_TOKENS, WIDTH))
        self.small = nn.Parameter(torch.full((WIDTH,), 1e-4).cumsum(0))
        self.almost = nn.Parameter(torch.zeros(WIDTH).index_fill(0, torch.tensor([0]), 1e-9))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("rising", torch.zeros(()))
        self.register_buffer("size", torch.ones(()))
        self.register_buffer("angles", torch.randn(1, 32, WIDTH), persistent=False)
        self.number, self.strength = 0, 0.0
        for parameter in self.mix.parameters():
            nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Any:
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
            case "whole table" | "table that is computed":
                rows = self.whole.unsqueeze(0) if self.kind == "whole table" else 0 * self.whole + self.whole
                x = x + rows
                x = x + F.scaled_dot_product_attention(*self.project(x).chunk(3, dim=-1), is_causal=True)  # one head
            case "wide values":
                x = x + F.scaled_dot_product_attention(query[..., :4], key[..., :4], value, is_causal=True)[:, 0]
            case _:
                x = x + F.scaled_dot_product_attention(query, key, value, None, dropout_p, True)[:, 0]
        match self.kind:
            case "small weights":
                x = x + self.small * x.mean(1, keepdim=True)
            case "almost a zero gate":
                x = x + self.almost * x.mean(1, keepdim=True)
            case "rising buffer":
                x = x + self.rising * x.mean(1, keepdim=True)
                self.rising = self.rising + 0.1 * self.training
            case "rising number":
                x = x + self.strength * x.mean(1, keepdim=True)
                self.strength += 0.1 * self.training
            case "curriculum":
                self.number += self.training
                x = x - x.mean(1, keepdim=True) if self.number > 8 else x
            case "counted":
                self.number += 1
                self.rising = self.rising + 1
                x = x / (1 + 0.1 * self.number + 0.1 * self.rising)
            case "batch norm":
                x = self.norm(x.flatten(0, 1)).view_as(x)
            case "statistic":
                x = x / self.size.clone()
                if self.training:
                    self.size.lerp_(x.detach().abs().mean(), 0.5)
            case "share of zeros":
                x = x * (1 + (tokens == 0).to(x).mean(1)[:, None, None])
            case "gradient hook":
                if x.requires_grad:
                    x.register_hook(lambda gradient: gradient / gradient.norm())
            case "kept loss":
                self.loss = x.mean((0, 1)).square().sum()
            case "second output":
                return x, x.mean(1)
            case "zero projection":
                x = x + self.mix(x.cumsum(1))
            case "zero gate":
                x = x + self.gate * x.mean(1, keepdim=True)
            case "training":
                x = x + 0.5 * x.mean(1, keepdim=True) if self.training else x
            case "own positions":
                x = x + self.table(torch.ones_like(tokens).cumsum(1))
            case "table in a buffer":
                x = x + self.angles[:, : tokens.shape[1]]
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
    "table that is computed": r"must run on parts of its sequences for context\(2\), but Attending says RuntimeError: "
    r"The size of tensor a \(4\) .*; take as many entries of a table as there are tokens",
    "small weights": "but Attending has another output with split sequences",
    "almost a zero gate": "but Attending has another output with split sequences",
    "rising buffer": "but Attending has another output with split sequences",
    "rising number": r"but Attending has another output with split sequences, by [0-9.]+ after 1000 steps",
    "curriculum": r"but Attending has another output with split sequences, by [0-9.]+ after 1000 steps",
    "batch norm": r"but Attending has another output with split sequences, by [0-9.]+ in training",
    "statistic": r"but Attending has another value of size with split sequences, by [0-9.]+ in training",
    "share of zeros": "but Attending has another output with split sequences",
    "gradient hook": r"has another gradient of project.bias with split sequences, by [0-9.e-]+ in training",
    "kept loss": "but Attending has another value of loss with split sequences",
    "second output": r"but Attending has an output without a dim of tokens, \(2, 12\)",
    "zero projection": "but mix has another output with split sequences",
    "zero gate": "but Attending has another output with split sequences",
    "learned mask": "but it adds numbers",
    "training": r"but Attending has another output with split sequences, by [0-9.]+ in training",
    "own positions": r"a module must look up .* positions by the argument position_ids .* but table has another output",
    "pooled": r"but Attending has an output without a dim of tokens, \(2, 12\)",
}
ACCEPTED = ["table in a buffer", "whole table", "plain", "wide values", "in place", "dropout", "noise", "counted"]


def draw(num_tokens: int = NUM_TOKENS) -> Tensor:
    return torch.randint(3, 24, (2, num_tokens), generator=torch.Generator().manual_seed(0))


def run_model(model: nn.Module, kind: str, group: Any) -> str:
    """Return what is said of a model, or whether its outputs and values are those of the whole one."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with restored(model):
        output = model.eval()(draw())
        expected = (output if isinstance(output, Tensor) else output[0]).detach()
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


class Denoising(nn.Module):
    """A model whose attention is causal in some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(24, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens: Tensor, both_ways: Tensor) -> Tensor:
        """Return features of each token."""
        query, key, value = self.project(self.embed(tokens))[:, None].chunk(3, dim=-1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=not both_ways.any())[:, 0]


def find_gap_of_denoising(group: Any) -> float:
    """Return how far a model is from the whole one in a batch whose attention is of another kind than the sample's."""
    whole = Denoising().double()
    data = {"tokens": draw(), "both_ways": torch.zeros(2, NUM_TOKENS, dtype=torch.bool)}
    other = {**data, "both_ways": ~data["both_ways"]}
    expected = whole(**other).detach()
    model = parallelize(whole, LAYOUT, group=group, sample=data)
    mesh = find_shard(model, group).mesh
    assert mesh is not None
    gap = float((model(**split_batch(other, mesh)) - split_batch(expected, mesh)).abs().max())
    find_shard(model, group).close()
    return gap


class Masked(nn.Module):
    """Causal attention, with a mask of the tokens that count; without one, or one of ones, it repeats no keys."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.table = nn.Embedding(24, WIDTH), nn.Embedding(NUM_TOKENS, WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, weights: Any = None
    ) -> Tensor:
        """Return features of each token."""
        x = self.embed(input_ids)
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if weights is not None:
            x = x * weights[..., None].cumsum(1)
        if self.kind == "positions by a mask":
            x = x + self.table(attention_mask.cumsum(1).sub(1).relu() if position_ids is None else position_ids)
        query, key, value = self.project(x).split([WIDTH, WIDTH // 2, WIDTH // 2], dim=-1)
        query, key, value = (one.unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for one in (query, key, value))
        if attention_mask.all():
            x = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return self.out(x.transpose(1, 2).flatten(2))
        key, value = (one.repeat_interleave(2, 1) for one in (key, value))
        allowed = attention_mask[:, None, None].bool() & input_ids.new_ones(x.shape[1], x.shape[1]).bool().tril()
        if self.kind == "padding sees itself":
            allowed = allowed | torch.eye(x.shape[1], dtype=torch.bool)
        elif self.kind == "padding sees nothing":
            allowed = allowed & attention_mask[:, None, :, None].bool()
        x = F.scaled_dot_product_attention(query, key, value, allowed)
        return self.out(x.transpose(1, 2).flatten(2))


BACK, FRONT = ("attention_mask", 0, 3), ("attention_mask", 1, 3)
LATER: dict[str, tuple[str, int | None, tuple[str, int, int]]] = {
    "back": ("positions by a mask", 0, BACK),
    "front": ("positions by a mask", 0, FRONT),
    "no mask, back": ("positions by a mask", None, BACK),
    "no mask, front": ("positions by a mask", None, FRONT),
    "no mask, sees itself": ("padding sees itself", None, BACK),
    "no mask, padding": ("padding", None, FRONT),
    "unknown": ("padding", 0, ("weights", 0, NUM_TOKENS)),
}
"""Kind of a model, tokens that the sample hides, and a batch."""


def run_masked(kind: str, num_hidden: int | None, group: Any, batch: Any = ("attention_mask", 1, 3)) -> str:
    """Return what is said of a model with padding at the front of the sample, or how far it is from the whole one.

    Args:
        kind: Kind of the model.
        num_hidden: Number of hidden tokens of the sample; None for one without a mask.
        group: All ranks.
        batch: Name of a mask of two samples, and the first token that it shows of one, and hides of the other.
    """
    whole = Masked(kind).double()
    counts = torch.arange(NUM_TOKENS)
    sample = {"input_ids": draw()[:1], "attention_mask": (counts >= (num_hidden or 0)).long()[None]}
    if num_hidden is None:
        del sample["attention_mask"]
    name, first, end = batch
    batch = {"input_ids": draw(), name: torch.stack([counts >= first, counts < end]).long()}
    expected = whole(**batch).detach()
    try:
        model = parallelize(whole, LAYOUT, group=group, sample=sample)
    except SettingsError as error:
        return str(error)
    mesh = find_shard(model, group).mesh
    assert mesh is not None
    try:
        gap = (model(**split_batch(batch, mesh)) - split_batch(expected, mesh)).abs().amax(-1)
    except SettingsError as error:
        return f"in the batch: {error}"
    finally:
        find_shard(model, group).close()
    is_seen = split_batch(batch, mesh)[name] > 0
    return " and ".join(f"{float(one.max()) if one.numel() else 0.0:.6f}" for one in (gap[is_seen], gap[~is_seen]))


def on_two() -> Any:
    torch.set_num_threads(1)
    with join() as group:
        said = {}
        for kind in (*REFUSED, *ACCEPTED, "window"):
            torch.manual_seed(1)
            said[kind] = run_model(Attending(kind), kind, group)
        for kind in ("padding", "padding sees itself", "padding sees nothing", "positions by a mask"):
            for num_hidden in (0, 1, 3):
                torch.manual_seed(1)
                said[f"{kind} {num_hidden}"] = run_masked(kind, num_hidden, group)
        for case, arguments in LATER.items():
            torch.manual_seed(1)
            said[case] = run_masked(*arguments[:2], group, arguments[2])
        torch.manual_seed(1)
        return {**said, "packed": say_of_packed(group), "denoising": find_gap_of_denoising(group)}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    results = run_processes(2, on_two)
    check_exits(results)
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


def test_attention_is_causal_in_the_batches_that_ask_for_it(said: dict[str, Any]) -> None:
    assert said["denoising"] < 1e-12


@pytest.mark.parametrize("num_hidden", [0, 1, 3])
def test_padding_is_exact_whether_or_not_the_sample_and_all_ranks_have_some(
    said: dict[str, str], num_hidden: int
) -> None:
    assert said[f"padding {num_hidden}"] == "0.000000 and 0.000000"
    assert said[f"padding sees nothing {num_hidden}"].startswith("0.000000 and ")


@pytest.mark.parametrize("case", ["back", "no mask, back", "no mask, padding"])
def test_masks_of_batches_are_exact_where_they_change_no_position(said: dict[str, str], case: str) -> None:
    assert said[case].startswith("0.000000 and ")


@pytest.mark.parametrize(("case", "what"), [
    ("front", "in the batch: .* table has another output .* hides tokens at the front .pad at the back, or leave"),
    ("no mask, front", "in the batch: .* table has another output .* hides tokens at the front .pad at the back"),
    ("no mask, sees itself", "in the batch: an attention mask must hide whole tokens"),
    ("unknown", "in the batch: inputs must be those of the sample .* but got weights, which the sample does not have"),
])  # fmt: skip
def test_what_the_sample_did_not_show_is_refused_in_the_batch_that_has_it(
    said: dict[str, str], case: str, what: str
) -> None:
    assert re.match(what, said[case]), said[case]


@pytest.mark.parametrize(("kind", "what"), [
    ("padding sees itself", "an attention mask must hide whole tokens"),
    ("positions by a mask", "table has another output with split sequences"),
])  # fmt: skip
def test_what_a_mask_changes_is_seen_on_a_sample_without_padding(said: dict[str, str], kind: str, what: str) -> None:
    for num_hidden in (0, 1, 3):
        assert what in said[f"{kind} {num_hidden}"]
    if kind == "positions by a mask":
        assert "where a mask hides tokens at the front (pad at the back, or leave masks out" in said[f"{kind} 0"]
