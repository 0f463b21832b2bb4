from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import SettingsError
from paceline.topology.partition import partition

always = settings(deadline=None, derandomize=True)
COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def all_cuts(num_items: int, num_parts: int) -> list[list[range]]:
    return [
        [range(begin, end) for begin, end in pairwise([0, *inner, num_items])]
        for inner in combinations(range(1, num_items), num_parts - 1)
    ]


def sums(costs: list[int], parts: list[range]) -> list[int]:
    return [sum(costs[i] for i in part) for part in parts]


@always
@given(COSTS, st.data())
def test_no_cut_has_a_cheaper_dearest_part_nor_more_even_parts(costs: list[int], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(costs)))
    parts = partition(costs, num_parts)
    rivals = [sums(costs, rival) for rival in all_cuts(len(costs), num_parts)]
    dearest = min(max(rival) for rival in rivals)
    assert [i for part in parts for i in part] == list(range(len(costs)))
    assert all(len(part) > 0 for part in parts)
    assert max(sums(costs, parts)) == dearest
    squares = [sum(cost * cost for cost in rival) for rival in rivals if max(rival) == dearest]
    assert sum(cost * cost for cost in sums(costs, parts)) == min(squares)


@always
@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=12), st.data())
def test_costs_with_rounding_are_cut_no_worse(costs: list[float], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(costs)))
    dearest = max(sum(costs[i] for i in part) for part in partition(costs, num_parts))
    best = min(max(sum(costs[i] for i in part) for part in rival) for rival in all_cuts(len(costs), num_parts))
    assert dearest <= best * (1 + 1e-6)


def test_a_model_of_many_layers_is_cut_at_once() -> None:
    costs = [3.0, *[1.0] * 200, 5.0]
    assert max(sum(costs[i] for i in part) for part in partition(costs, 16)) == 13.0  # 208 / 16


@pytest.mark.parametrize(
    ("costs", "num_parts", "message"),
    [
        ([1.0, 2.0], 3, "at least 1 and at most its items, but got 3 parts of 2 items"),
        ([1.0], 0, "but got 0 parts"),
        ([1.0, -1.0], 1, "item 1 has -1"),
        ([float("nan")], 1, "item 0 has nan"),
    ],
)
def test_what_cannot_be_cut_is_refused(costs: list[float], num_parts: int, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        partition(costs, num_parts)
