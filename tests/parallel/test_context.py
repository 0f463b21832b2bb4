"""Sequences shared by processes: the same losses and gradients as in one, with matrices shared too or not."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm import join
from paceline.comm.local_group import LocalGroup
from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.parallel.context import (
    FULL_CONTEXT,
    ContextParallelModule,
    check_length,
    full_sequences,
    split_attention,
    split_batch,
    split_sequences,
)
from paceline.parallel.mesh import Mesh
from paceline.parallel.tensor import full_tensor, split
from paceline.parallel.tensor_plan import make_plan
from paceline.recipes.bert.model import Bert
from paceline.recipes.transformer_lm.model import TransformerLM
from paceline.testing import run_processes
from paceline.topology.layout import Axes, Layout
from paceline.training.model import Model

# Sums in another order: some 1e-7 of the largest term each, over a few thousand terms.
TOLERANCE = 5e-6
LAYOUTS = [{"context": 2}, {"context": 4}, {"tensor": 4}, {"tensor": 2, "context": 2}]

IDS = [*(" ".join(f"{axis}{size}" for axis, size in sizes.items()) for sizes in LAYOUTS), "bert tensor2 context2"]
"""Names of the decoder under each, and of a model with biases, learned positions and attention in both directions."""


class Attender(ContextParallelModule):
    """Attention alone, and positions."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.project = nn.Linear(4, 3 * 4, dtype=torch.float64)

    def forward(self, x_BTW: Tensor) -> Tensor:
        position_T = self.context.positions(x_BTW.shape[1], x_BTW.device)
        heads = (self.project(x_BTW) + position_T[:, None].sin()).unflatten(-1, (2, 6)).transpose(1, 2)
        return self.context.attend(*heads.chunk(3, dim=-1), is_causal=self.is_causal)


def compare_attention(mesh: Mesh, *, is_causal: bool) -> list[float]:
    """Return by how much outputs and gradients differ from those of whole sequences, in float64."""
    torch.manual_seed(2)
    one = Attender(is_causal)
    two = copy.deepcopy(one)
    split_attention(two, mesh)
    x = torch.randn(2, 16, 4, dtype=torch.float64)
    wanted = torch.randn(2, 16, 2, 2, dtype=torch.float64)
    expected = one(x).transpose(1, 2)
    (expected * wanted).sum().backward()
    mine = two(split_sequences(x, mesh)).transpose(1, 2)
    (mine * split_sequences(wanted, mesh)).sum().backward()
    return [
        float((mine - split_sequences(expected, mesh)).abs().max()),
        float((summed(two.project.weight.grad, mesh) - one.project.weight.grad).abs().max()),
    ]


def summed(value: Tensor, mesh: Mesh) -> Tensor:
    total = value.detach().clone()
    mesh.group("context").all_reduce(total, name="sum").wait()
    return total


def train(mesh: Mesh, settings: Model) -> dict[str, float]:
    torch.manual_seed(0)
    one = settings.build(Spec(num_classes=32, input_shape=(16,)))
    for parameter in one.parameters():  # biases too, which begin as zeros
        nn.init.normal_(parameter, std=0.2)
    two = copy.deepcopy(one)
    made = split(two, mesh, make_plan(two, None, mesh.size("tensor")))
    split_attention(two, mesh)
    drawn = torch.randint(32, (3, 17), generator=torch.Generator().manual_seed(1))
    inputs, targets = drawn[:, :-1], drawn[:, 1:]
    expected = F.cross_entropy(one(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    expected.backward()
    with made.parallel_loss():
        logits = two(split_sequences(inputs, mesh))
        loss = full_tensor(
            F.cross_entropy(logits.flatten(0, 1), split_sequences(targets, mesh).flatten(), reduction="sum")
        )
        loss.backward()
    errors = [
        (summed(full_tensor(mine.grad), mesh) - parameter.grad).abs().max() / parameter.grad.abs().max()
        for parameter, mine in zip(one.parameters(), two.parameters(), strict=True)
    ]
    with torch.no_grad(), full_sequences(two):  # five tokens: neither axis could cut them
        whole_error = (two(inputs[:, :5]) - one(inputs[:, :5])).abs().max()
    return {
        "loss": abs(float(summed(loss, mesh) / expected.detach()) - 1),
        "gradient": float(max(errors)),
        "whole": float(whole_error),
    }


def on_four() -> dict[str, Any]:
    with join() as group:
        meshes = [Mesh(group, Layout(**sizes).resolve(group.size)) for sizes in LAYOUTS]
        models: list[Model] = [TransformerLM(width=32, num_layers=2, num_heads=4) for _ in meshes]
        models.append(Bert(width=32, num_layers=2, num_heads=4, dropout=0.0))
        pairs = zip([*meshes, meshes[-1]], models, strict=True)
        result: dict[str, Any] = {"trained": [train(mesh, model) for mesh, model in pairs]}
        for name, is_causal in (("causal", True), ("both ways", False)):
            result[name] = [compare_attention(mesh, is_causal=is_causal) for mesh in meshes[:2]]
        for mesh in meshes:
            mesh.close()
    return result


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    results = run_processes(4, on_four, timeout_s=55)
    for result in results:
        assert result.exit_code == 0, result.output
    return [result.value for result in results]


@pytest.mark.parametrize("place", range(len(IDS)), ids=IDS)
def test_a_transformer_has_the_loss_and_gradients_of_one_process(ranks: list[dict[str, Any]], place: int) -> None:
    for rank in ranks:
        errors = rank["trained"][place]
        assert errors["loss"] < TOLERANCE
        assert errors["gradient"] < TOLERANCE
        assert errors["whole"] < TOLERANCE


@pytest.mark.parametrize("kind", ["causal", "both ways"])
def test_attention_to_gathered_keys_is_exact(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        for errors in rank[kind]:
            assert max(errors) < 1e-12  # float64


def place_at(rank: int, size: int) -> Mesh:
    group = LocalGroup()
    group.rank = rank
    return Mesh(group, Axes((1, 1, 1, 1, size, 1)))


def test_every_token_is_on_one_rank_and_causal_work_is_even() -> None:
    tokens = torch.arange(24)[None]
    parts = [split_sequences(tokens, place_at(rank, 3))[0] for rank in range(3)]
    assert parts[0].tolist() == [0, 1, 2, 3, 20, 21, 22, 23]
    assert torch.equal(torch.cat(parts).sort().values, tokens[0])
    assert len({int(part.sum()) for part in parts}) == 1  # pairs of a token are its position and one
    assert torch.equal(split_sequences(tokens, place_at(0, 1)), tokens)


def test_every_tensor_of_a_batch_is_cut_alike() -> None:
    batch = {"ids": torch.arange(24).view(3, 8), "mask": torch.ones(3, 8, 2), "text": ["a", "b", "c"]}
    cut = [split_batch(batch, place_at(rank, 2)) for rank in range(2)]
    assert [part["ids"][0].tolist() for part in cut] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert {part["mask"].shape for part in cut} == {(3, 4, 2)}
    assert cut[0]["text"] == batch["text"]
    for odd in (torch.zeros(3), torch.zeros(3, 4)):  # labels of whole sequences, and features
        with pytest.raises(SettingsError, match=r"as many tokens .* but got {ids: int64\[3, 8\], odd: float32\[3"):
            split_batch({"ids": batch["ids"], "odd": odd}, place_at(0, 2))


def test_lengths_that_cannot_be_cut_are_refused_with_their_arithmetic() -> None:
    with pytest.raises(SettingsError, match=r"context\(2\) must be a multiple of 4 tokens, but got 30 = 4 \* 7 \+ 2"):
        split_sequences(torch.zeros(2, 30), place_at(0, 2))
    with pytest.raises(SettingsError, match="must have a token dim"):
        split_sequences(torch.zeros(2), place_at(0, 2))
    with pytest.raises(
        SettingsError, match=r"context\(2\) and tensor\(3\) must be a multiple of 12 .* choose 24 or 36"
    ):
        check_length(32, context=2, tensor=3)
    check_length(12, context=2, tensor=3)
    check_length(8, context=2, tensor=4)
    check_length(3, context=1, tensor=3)
    with pytest.raises(SettingsError, match=r"tensor\(3\) must be a multiple of 3 tokens, but got 2 = .*; choose 3"):
        check_length(2, context=1, tensor=3)


def test_attention_that_would_not_look_at_other_ranks_is_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"ContextParallelModule for context\(2\), but no module of the Linear does"
    ):
        split_attention(nn.Linear(2, 2), place_at(0, 2))
    model = nn.Sequential(Attender(True), nn.MultiheadAttention(4, 2))
    with pytest.raises(SettingsError, match="but 1 does not"):
        split_attention(model, place_at(0, 2))


def test_one_rank_keeps_whole_sequences() -> None:
    model = Attender(is_causal=True)
    split_attention(model, place_at(0, 1))
    assert model.context is FULL_CONTEXT
