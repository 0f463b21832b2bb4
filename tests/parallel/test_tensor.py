"""Matrices shared by two processes: the same losses and gradients as in one."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.comm import join
from paceline.comm.local_group import LocalGroup
from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.parallel.mesh import Mesh
from paceline.parallel.tensor import TensorSplit, TiedHead, full_tensor, split
from paceline.parallel.tensor_plan import make_plan
from paceline.recipes.transformer_lm.model import Transformer, TransformerLM
from paceline.testing import run_processes
from paceline.topology.layout import Layout

VOCABULARY = 32
# Sums in another order: some 1e-7 of the largest term each, over a few thousand terms.
TOLERANCE = 5e-6


def build(num_heads: int = 4, vocabulary: int = VOCABULARY) -> Transformer:
    torch.manual_seed(0)
    settings = TransformerLM(width=32, num_layers=2, num_heads=num_heads)
    return settings.build(Spec(num_classes=vocabulary, input_shape=(8,)))


def split_by(module: nn.Module, mesh: Mesh, patterns: dict[str, str] | None = None) -> TensorSplit:
    return split(module, mesh, make_plan(module, patterns, mesh.size("tensor")))


def tokens(length: int = 8) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCABULARY, (3, length + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two models' gradients, relative to the largest element of each parameter's."""
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    worst = 0.0
    for (name, parameter), (other_name, other_parameter) in pairs:
        assert name == other_name
        assert isinstance(other_parameter, DTensor)
        assert parameter.grad is not None
        assert other_parameter.grad is not None
        error = (full_tensor(other_parameter.grad) - parameter.grad).abs().max() / parameter.grad.abs().max()
        worst = max(worst, float(error))
    return worst


def train_transformer(mesh: Mesh) -> dict[str, Any]:
    """Two micro-batches, with whole and with cut logits."""
    one = build()
    two = copy.deepcopy(one)
    made = split_by(two, mesh)
    inputs, targets = tokens()
    result: dict[str, Any] = {"cuts_tokens": made.cuts_tokens, "placements": {}, "cut": {}, "whole": {}}
    for model, kind in ((one, None), (two, "whole"), (two, "cut")):
        model.zero_grad()
        with made.parallel_loss() if kind == "cut" else nullcontext():
            for rows in (slice(0, 2), slice(2, 3)):
                logits = model(inputs[rows])
                assert isinstance(logits, DTensor) == (kind == "cut")
                loss = full_tensor(F.cross_entropy(logits.flatten(0, -2), targets[rows].flatten(), reduction="sum"))
                loss.backward()
        if kind is None:
            expected = float(loss)
        else:
            result[kind] = {"loss": abs(float(loss) - expected) / expected, "gradient": difference(one, two)}
    for name, parameter in two.named_parameters():
        result["placements"][name] = [str(parameter.placements[0]), str(parameter.grad.placements[0])]
    return result


def generate(mesh: Mesh) -> float:
    """Seven tokens cannot be cut in two, and need not where nothing is learnt."""
    one = build()
    two = copy.deepcopy(one)
    split_by(two, mesh)
    inputs, _ = tokens(7)
    with pytest.raises(SettingsError, match=r"multiple of tensor\(2\) tokens, but got 7 = 2 \* 3 \+ 1; choose 6 or 8"):
        two(inputs)
    with torch.no_grad():
        return float((one(inputs) - two(inputs)).abs().max())


def autocast(mesh: Mesh) -> list[float]:
    one = build()
    two = copy.deepcopy(one)
    made = split_by(two, mesh)
    inputs, targets = tokens()
    losses = []
    for model in (one, two):
        with made.parallel_loss() if model is two else nullcontext():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(inputs).float()
            loss = full_tensor(F.cross_entropy(logits.flatten(0, -2), targets.flatten()))
            loss.backward()
        losses.append(float(loss))
    assert all(parameter.grad.dtype == torch.float32 for parameter in two.parameters())
    return [abs(losses[1] - losses[0]), difference(one, two)]


def split_embedding_alone(mesh: Mesh) -> dict[str, Any]:
    """All else is computed on both ranks, and optimizer and clipping see DTensors only."""
    one = build()
    two = copy.deepcopy(one)
    made = split_by(two, mesh, {"embedding": "vocabulary"})
    inputs, targets = tokens()
    norms: list[list[float]] = [[], []]
    for model, seen in zip((one, two), norms, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            seen.append(float(full_tensor(nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
            optimizer.step()
    return {"styles": dict(made.plan.styles), "norms": norms, "gradient": difference(one, two)}


class Perceptron(nn.Module):
    """A user's own model: biases, a norm on hidden dims, an untied vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 12, padding_idx=17)
        self.norm = nn.LayerNorm(12)
        self.expand = nn.Linear(12, 16)
        self.project = nn.Linear(16, 12)
        self.mix = nn.LSTM(12, 12, batch_first=True)
        self.attend = nn.MultiheadAttention(12, 2, batch_first=True)
        self.logits = nn.Linear(12, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.words(tokens_BT)
        x = x + self.project(torch.relu(self.expand(self.norm(x))))
        x = x + self.mix(x)[0]
        x = x + self.attend(x, x, x)[0]
        return self.logits(x)


PLAN = {"words": "vocabulary", "expand": "columns", "project": "rows", "logits": "vocabulary"}


def split_perceptron(mesh: Mesh) -> float:
    torch.manual_seed(3)
    one = Perceptron()
    for name, parameter in one.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    two = copy.deepcopy(one)
    made = split_by(two, mesh, PLAN)
    inputs, targets = tokens()
    inputs = inputs.clone()
    inputs[0, :3] = 17
    for model in (one, two):
        with made.parallel_loss() if model is two else nullcontext():
            logits = model(inputs)
            loss = full_tensor(F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=3))
            loss.backward()
    return difference(one, two)


def on_two() -> dict[str, Any]:
    with join() as group:
        mesh = Mesh(group, Layout(tensor=2).resolve(group.size))
        result = {
            "transformer": train_transformer(mesh),
            "generated": generate(mesh),
            "autocast": autocast(mesh),
            "embedding": split_embedding_alone(mesh),
            "perceptron": split_perceptron(mesh),
        }
        mesh.close()
    return result


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    results = run_processes(2, on_two, timeout_s=55)
    for result in results:
        assert result.exit_code == 0, result.output
    return [result.value for result in results]


@pytest.mark.parametrize("logits", ["whole", "cut"])
def test_a_transformer_on_two_ranks_has_the_losses_and_gradients_of_one(
    ranks: list[dict[str, Any]], logits: str
) -> None:
    for rank in ranks:
        assert rank["transformer"][logits]["loss"] < TOLERANCE
        assert rank["transformer"][logits]["gradient"] < TOLERANCE


def test_types_cut_every_matrix_and_leave_gradients_of_norms_to_be_summed(ranks: list[dict[str, Any]]) -> None:
    placements = ranks[0]["transformer"]["placements"]
    assert ranks[0]["transformer"]["cuts_tokens"]
    for name, (lies, gradient) in placements.items():
        if "norm" in name:
            assert (lies, gradient) == ("R", "P(sum)")
        else:
            assert lies == gradient == ("S(1)" if "project" in name else "S(0)")
    assert len(placements) == 2 + 2 * 7


def test_a_length_that_cannot_be_cut_is_generated_from_whole_but_not_learnt(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["generated"] < TOLERANCE


def test_autocast_computes_in_bfloat16_and_keeps_gradients(ranks: list[dict[str, Any]]) -> None:
    loss, gradient = ranks[0]["autocast"]
    assert loss < 2e-2  # eight bits of mantissa
    assert 1e-4 < gradient < 0.1  # and no more: it was no float32


def test_a_plan_may_split_the_embedding_alone(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["embedding"]["styles"] == {"embedding": "vocabulary", "head": "vocabulary"}
        assert rank["embedding"]["norms"][1] == pytest.approx(rank["embedding"]["norms"][0], rel=TOLERANCE)
        assert rank["embedding"]["gradient"] < 10 * TOLERANCE  # of the third step: the second's parameters differed


def test_a_users_module_is_split_by_names(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["perceptron"] < TOLERANCE


def refuse(module: nn.Module, size: int, plan: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as raised:
        make_plan(module, plan, size)
    return str(raised.value)


def test_what_cannot_be_dealt_out_is_refused_with_its_arithmetic() -> None:
    message = refuse(build(num_heads=2), 4)
    assert message == (
        "num_heads of layers.0.attention must be a multiple of tensor(4), but got 2 = 4 * 0 + 2; choose 4, or another "
        "layout"
    )
    assert "the vocabulary of embedding must be a multiple of tensor(2), but got 33 = 2 * 16 + 1" in refuse(
        build(vocabulary=33), 2
    )
    assert "the outputs of expand must be a multiple of tensor(3), but got 16 = 3 * 5 + 1" in refuse(
        Perceptron(), 3, {"expand": "columns"}
    )


def test_names_that_are_unknown_or_unfit_are_refused() -> None:
    message = refuse(build(), 2, {"layers.*.attention.projct": "rows"})
    assert "a pattern in the tensor plan must be a known name, but got 'layers.*.attention.projct'" in message
    assert "did you mean 'layers.*.attention.project'?" in message
    assert "did you mean 'rows'?" in refuse(build(), 2, {"layers.*.attention.project": "row"})
    assert "must be an nn.Linear, but norm is a LayerNorm" in refuse(build(), 2, {"norm": "columns"})
    assert "must be an nn.Linear or nn.Embedding, but norm is" in refuse(build(), 2, {"norm": "vocabulary"})
    sparse = nn.ModuleDict({"words": nn.Embedding(8, 4, sparse=True)})
    assert "no max_norm, sparse or" in refuse(sparse, 2, {"words": "vocabulary"})
    assert "mlp.expand in layers.0.mlp is not" in refuse(build(), 2, {"layers.*.mlp": "gather", "*.gate": "columns"})
    assert "the tensor plan names head alone" in refuse(build(), 2, {"head": "vocabulary"})


def test_tied_parameters_have_one_style() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(8, 4), "logits": nn.Linear(4, 8, bias=False)})
    model["logits"].weight = model["words"].weight
    message = refuse(model, 2, {"words": "vocabulary"})
    assert "words.weight and logits.weight are one" in message


def test_one_rank_changes_nothing() -> None:
    model = build()
    inputs, _ = tokens()
    before = model(inputs)
    made = split_by(model, Mesh(LocalGroup(), Layout().resolve(1)))
    with made.parallel_loss():
        assert torch.equal(model(inputs), before)
    assert not made.cuts_tokens
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_a_tied_head_adds_its_bias() -> None:
    head = TiedHead(nn.Parameter(torch.arange(3.0)))
    assert torch.equal(head(torch.ones(2, 4), torch.ones(3, 4)), torch.tensor([[4.0, 5, 6], [4, 5, 6]]))
