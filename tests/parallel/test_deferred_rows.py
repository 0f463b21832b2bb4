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
    "truncated": lambda weight, place: nn.init.trunc_normal_(weight[place]),
    "truncated columns": lambda weight, place: nn.init.trunc_normal_(weight[:, place]),
    "probabilities": lambda weight, place: weight.data[place].bernoulli_(weight.data[place - 1].sigmoid()),
}


READING = {"truncated", "truncated columns", "probabilities"}
"""Pieces that read values while they are made."""


def make_pieces(kind: str) -> nn.Module:
    module = nn.Linear(24, 20)
    for place in range(20):
        PIECES[kind](module.weight, place)
    return module


@pytest.mark.parametrize("kind", PIECES)
def test_pieces_are_those_of_the_whole_construction(kind: str) -> None:
    compare(lambda: make_pieces(kind))


@pytest.mark.parametrize("kind", [kind for kind in PIECES if kind not in READING])
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


def test_what_a_piece_reads_of_itself_needs_no_other_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the rows, which each look at their own values, carry out twice the operations, not four times."""
    num_run = 0
    run = recording._Operation.run

    def count(operation: recording._Operation, *args: object) -> None:
        nonlocal num_run
        num_run += 1
        run(operation, *args)  # type: ignore[arg-type]

    def make(num_rows: int) -> nn.Module:
        module = nn.Linear(32, num_rows)
        for row in module.weight.detach():
            while row.normal_().abs().max() > 10:
                pass
        return module

    monkeypatch.setattr(recording._Operation, "run", count)
    counts = []
    for num_rows in (10, 20):
        num_run = 0
        defer(lambda: make(num_rows))  # noqa: B023
        counts.append(num_run)
    assert 0 < counts[1] <= 2 * counts[0]


def build_with_a_piece_of_another() -> nn.Module:
    module = nn.Linear(8, 8)
    with torch.no_grad():
        module.weight[5].normal_()
        module.weight[0].copy_(module.weight[5])
        module.bias.fill_(float(module.weight[0].sum()))
    return module


def test_a_value_of_a_piece_that_is_made_of_another_piece() -> None:
    compare(build_with_a_piece_of_another)
