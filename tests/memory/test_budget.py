"""The choice of blocks: the best there is, and within its budget."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_models import compute_loss, make_transformer

from paceline.errors import SettingsError
from paceline.memory import StepDescription, find_recomputable, plan, recompute, rehearse
from paceline.memory.budget import Block, choose

OPTIONS = ("none", "selective", "full")


def make_block(number, kept, cost):
    names = dict(zip(OPTIONS, sorted(kept, reverse=True), strict=True))
    return Block(str(number), names, dict(zip(OPTIONS, (0.0, *sorted(cost)), strict=True)))


def try_all(blocks, budget, before, after):
    """Return the least cost of all combinations that fit."""
    best = None
    for choices in product(OPTIONS, repeat=len(blocks)):
        used, most = before, before
        for block, choice in zip(blocks, choices, strict=True):
            whole = used + block.kept["none"]
            used += block.kept[choice]
            most = max(most, used, whole if choice != "none" else 0)
        if max(most, used + after) <= budget:
            cost = sum(block.cost[choice] for block, choice in zip(blocks, choices, strict=True))
            best = cost if best is None else min(best, cost)
    return best


sizes = st.integers(0, 60)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.tuples(sizes, sizes, sizes), st.tuples(sizes, sizes)), min_size=1, max_size=5),
    st.integers(1, 250),
    sizes,
    sizes,
)
def test_no_combination_that_fits_costs_less(blocks, budget, before, after):
    made = [make_block(number, kept, cost) for number, (kept, cost) in enumerate(blocks)]
    least = try_all(made, budget, before, after)
    chosen = choose(made, budget, before, after)
    if least is None:
        assert chosen == []
    else:
        assert sum(block.cost[choice] for block, choice in zip(made, chosen, strict=True)) == least


def build(choices):
    module = make_transformer(width=64, num_layers=4)
    recompute(module, choices)
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


STEP = StepDescription(build, compute_loss, torch.device("cpu"))


@pytest.mark.slow
def test_a_budget_is_kept_and_as_little_as_can_be_recomputed():
    names = list(find_recomputable(build({})[0]))
    whole = rehearse(STEP).peak_activation_bytes
    least = rehearse(STEP, dict.fromkeys(names, "full")).peak_activation_bytes
    assert plan(STEP, names, whole) == {}
    counts = []
    for budget in (int(0.9 * whole), int(0.6 * whole), least):
        chosen = plan(STEP, names, budget)
        assert rehearse(STEP, chosen).peak_activation_bytes <= budget
        counts.append(sum({"selective": 1, "full": 2}[choice] for choice in chosen.values()))
    assert 0 < counts[0] < counts[1] <= counts[2]
    with pytest.raises(SettingsError, match=f"budget of at least {least} bytes"):
        plan(STEP, names, least - 1)
