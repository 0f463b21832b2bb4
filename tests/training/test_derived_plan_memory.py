"""Estimates of models whose tensor plan is found by trying, against what a tracker counts in real steps."""

import pytest
import torch
from test_layout_rehearsal import CASES, measure
from test_memory_estimate import CPU, TEXT, make_run
from torch import nn

from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout
from paceline.training import Run, layout_rehearsal
from paceline.training.memory_fit import estimate
from paceline.training.model import FunctionModel

WIDTH = 48


class Block(nn.Module):
    """Attention and a network, in a style that nobody registered, with a norm and a map that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.num_heads = nn.LayerNorm(WIDTH), 4
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.shrink = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.alone = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(mixed)
        x = x + self.shrink(self.expand(x).relu())
        return x + self.alone(x).tanh()


class Own(nn.Module):
    """A small language model with large tables, which are whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, WIDTH), nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_own(tensor: int) -> Run:
    return make_run(layout=Layout(tensor=tensor), model=FunctionModel(path=f"{__file__}:Own"))


def measure_own(tensor: int) -> dict[str, object]:
    CASES["own"] = {"layout": Layout(tensor=tensor), "model": FunctionModel(path=f"{__file__}:Own")}
    return measure(["own"]).get("own", {})


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_rank_needs_what_was_estimated_by_the_plan_that_is_found(tensor: int) -> None:
    results = run_processes(tensor, measure_own, {"tensor": tensor})
    check_exits(results)
    random = torch.get_rng_state()
    estimated, measured = estimate(make_own(tensor), TEXT, tensor, CPU), results[0].value
    assert torch.equal(torch.get_rng_state(), random)
    assert not estimated.is_rough
    assert estimated.peak_bytes == pytest.approx(measured["peak"], rel=0.04)  # 10 % are promised


def test_a_model_that_is_too_large_to_try_is_divided_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_rehearsal, "_MOST_TRIED", 1000)
    assert estimate(make_own(2), TEXT, 2, CPU).is_rough
