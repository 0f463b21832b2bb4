"""A construction that initialises piece by piece is recorded and carried out once, whatever the pieces are."""

from collections.abc import Callable

import pytest
import torch
from test_deferred_questions import compare
from torch import Tensor, nn

from paceline.parallel import defer
from paceline.parallel.deferred import recording

PIECES: dict[str, Callable[[Tensor, int], object]] = {
    "rows": lambda weight, place: nn.init.normal_(weight[place]),
    "columns": lambda weight, place: nn.init.uniform_(weight[:, place]),
    "parts of rows": lambda weight, place: weight.data[place, :5].normal_(),
    "rare values": lambda weight, place: weight.data[place].exponential_(),
    "logarithms": lambda weight, place: weight.data[place].log_normal_(),
    "tails": lambda weight, place: weight.data[place].cauchy_(),
    "trials": lambda weight, place: weight.data[place].geometric_(0.3),
    "truth values": lambda weight, place: weight.data[place].bernoulli_(0.3),
    "whole numbers": lambda weight, place: weight.data[place].random_(3, 20),
    "probabilities": lambda weight, place: weight.data[place].bernoulli_(weight.data[place - 1].sigmoid()),
}


def make_pieces(kind: str) -> nn.Module:
    module = nn.Linear(24, 20)
    for place in range(20):
        PIECES[kind](module.weight, place)
    return module


@pytest.mark.parametrize("kind", PIECES)
def test_pieces_are_those_of_the_whole_construction(kind: str) -> None:
    compare(lambda: make_pieces(kind))


@pytest.mark.parametrize("kind", [kind for kind in PIECES if kind != "probabilities"])
def test_each_piece_is_drawn_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many operations are carried out as were recorded, instead of all before each piece."""
    num_run = 0
    run = recording._Operation.run

    def count(operation: recording._Operation, *args: object) -> None:
        nonlocal num_run
        num_run += 1
        run(operation, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(recording._Operation, "run", count)
    module, construction = defer(lambda: make_pieces(kind))
    assert num_run == 0
    construction.finish(module, torch.device("cpu"))
    assert num_run <= len(construction._recording._operations)
