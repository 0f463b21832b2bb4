"""Reasons of a plan: neighbours, changes of machines, ties; and the laws that they obey."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import make_machines, make_problem, posterior, price

from paceline.errors import SettingsError
from paceline.planner.choice import choose, find_ties
from paceline.planner.explain import WhatIf, describe_change, list_neighbours, list_what_ifs
from paceline.planner.planning import describe_choice, describe_what_if, make_plan, to_document
from paceline.planner.pool import MEMORY_HIGH, find_needs
from paceline.simulator.training import answer_rows


def slow_link(bandwidth, memory_bytes, num_ranks=8):
    """Return hosts of one device, whose links bind."""
    return make_machines("switch", num_ranks, memory_bytes=memory_bytes, bandwidth=bandwidth, device="a100_40gb")


@pytest.fixture(scope="module")
def problem():
    return make_problem(slow_link("25gbit", 24e9), global_batch=32)


@pytest.fixture(scope="module")
def choice(problem):
    return choose(*price(problem))


def test_neighbours_have_the_verdict_that_their_own_row_gives():
    problem = make_problem(slow_link("25gbit", 9e9), global_batch=32)
    choice = choose(*price(problem))
    neighbours = list_neighbours(choice)
    by_verdict = {verdict: [one for one in neighbours if one.verdict == verdict] for verdict in VERDICTS}
    assert len({one.candidate for one in neighbours}) == len(neighbours) > 10
    assert all(one.candidate != choice.needs.candidate for one in neighbours)
    assert all(by_verdict[verdict] for verdict in ("slower", "memory", "refused"))
    priced = [one for one in neighbours if one.ratio is not None]
    answers = answer_rows([problem.row_of(one.candidate) for one in priced])["rows"]
    own = answer_rows([problem.row_of(choice.needs.candidate)])["rows"][0]
    for one, answer in zip(priced, answers, strict=True):
        assert one.ratio == pytest.approx(answer["step_s"] / own["step_s"])
    for one in by_verdict["slower"]:
        assert one.ratio > 1
        assert one.reason.startswith("+")
        assert "most by" in one.reason
    for one in by_verdict["memory"]:
        needs = find_needs(problem, one.candidate)
        assert needs.memory_bytes * MEMORY_HIGH > 9e9
        assert f"up to {needs.memory_bytes * MEMORY_HIGH / 1e9:.3g} GB a rank of 9" in one.reason
    assert all("must" in one.reason for one in by_verdict["refused"])


VERDICTS = ("slower", "tie", "memory", "refused", "other")


def test_a_faster_neighbour_that_exceeds_a_limit_says_which_and_by_how_much():
    machines = make_machines(price=20.0), make_machines("dgx1", price=1.0)
    cheapest = choose(*price(make_problem(*machines, num_steps=1000, within_s=1e6)))
    budget = 1100 * cheapest.objectives[cheapest.index, 1]
    choice = choose(*price(make_problem(*machines, num_steps=1000, budget=budget)))
    assert choice.needs.candidate.machines == 1
    (other,) = (one for one in list_neighbours(choice) if one.change == "on dgx_a100")
    pool, candidates = choice.pool, [one.candidate for one in choice.pool.needs]
    spent = 1000 * choice.objectives[candidates.index(other.candidate), 1]
    assert spent > budget
    assert other.verdict == "other"
    assert other.ratio < pool.step_s[choice.best] / pool.step_s[choice.index]
    assert other.reason == f"{other.ratio - 1:+.0%}; it takes {spent / budget:.3g} times the money that is allowed"


def test_no_change_for_the_better_makes_a_plan_slower_and_the_best_is_no_slower_than_the_same(choice):
    changes = list_what_ifs(choice)
    assert [one.best_ratio for one in changes] == sorted(one.best_ratio for one in changes)
    for one in changes:
        assert one.best_ratio <= 1.0 + 1e-9
        if one.same_ratio is not None:
            assert one.same_ratio <= 1 + 1e-9
    by_words = {one.change: one for one in changes}
    assert by_words["twice the bandwidth between hosts"].best_ratio < 0.95  # 25 Gbit/s bind it
    assert "6 GB more memory on each device" in by_words


def test_what_more_memory_would_bring_is_what_planning_with_it_gives(problem, choice):
    machines = replace(problem.machines[0], memory_bytes=30e9)
    larger = choose(*price(replace(problem, machines=(machines,))))
    (change,) = (one for one in list_what_ifs(choice) if "memory on each device" in one.change and "GB" in one.change)
    fastest = larger.objectives[list(larger.front), 0].min()
    assert change.best_ratio == pytest.approx(fastest / choice.objectives[list(choice.front), 0].min())


def test_what_a_faster_link_would_bring_is_what_planning_with_it_gives(problem, choice):
    machines = slow_link("50gbit", 24e9)
    faster = choose(*price(replace(problem, machines=(machines,))))
    (change,) = (one for one in list_what_ifs(choice) if one.change == "twice the bandwidth between hosts")
    fastest = faster.objectives[list(faster.front), 0].min()
    assert change.best_ratio == pytest.approx(fastest / choice.objectives[list(choice.front), 0].min())


def test_ties_are_candidates_whose_ratio_is_less_sure_than_it_is_large(choice):
    pool = choice.pool
    near = [int(one) for one in np.argsort(np.abs(np.log(pool.step_s / pool.step_s[choice.index])))[1:15]]
    far = int(np.argmax(pool.step_s))
    ties = find_ties(pool, choice.index, [*near, far])
    assert far not in ties
    assert set(choice.ties) <= set(ties) | set(range(len(pool.needs)))
    spreads = pool.ratio_spreads([choice.index, *near])
    assert np.allclose(np.diag(spreads), 0)
    assert np.allclose(spreads, spreads.T)
    # What both share is less uncertain than each of them alone.
    alone = pool.spreads([choice.index, *near])
    assert (spreads[0, 1:] < np.hypot(alone[0], alone[1:])).all()
    assert (spreads[0, 1:] >= 0.03 * np.sqrt(2) - 1e-9).all()


@settings(max_examples=4, deadline=None)
@given(
    num_ranks=st.sampled_from([2, 4]),
    memory_gb=st.sampled_from([16, 24, 40]),
    bandwidth=st.sampled_from(["1gbit", "25gbit", "200gbit"]),
    global_batch=st.sampled_from([8, 12]),
)
def test_better_machines_never_make_the_best_plan_slower(num_ranks, memory_gb, bandwidth, global_batch):
    def best(memory, link, ranks=num_ranks):
        pool, _ = price(make_problem(slow_link(link, memory * 1e9, ranks), global_batch=global_batch))
        return pool.step_s[pool.fits].min() if pool.fits.any() else np.inf

    now = best(memory_gb, bandwidth)
    assert best(2 * memory_gb, bandwidth) <= now
    assert best(memory_gb, f"{2 * int(bandwidth[:-4])}gbit") <= now * (1 + 1e-9)
    assert best(memory_gb, bandwidth, 2 * num_ranks) <= now * (1 + 1e-9)  # half of them may stand still


def test_candidates_that_training_turns_out_to_refuse_are_neither_chosen_nor_shown(problem):
    first = make_plan(problem, posterior())
    (axis, *_) = first.candidate.division.axes
    second = make_plan(problem, posterior(), lambda one: "no" if axis in one.division.axes else "")
    shown = [second.choice.pool.needs[one].candidate for one in second.choice.shown]
    assert not any(axis in one.division.axes for one in shown)
    assert second.candidate in shown
    assert second.choice.refused
    assert not any(axis in one.best.division.axes for one in second.what_ifs)
    beside = [one for one in second.neighbours if one.candidate in second.choice.refused]
    assert beside
    assert {(one.verdict, one.reason) for one in beside} == {("refused", "training refuses it: no")}
    with pytest.raises(SettingsError, match="refuses"):
        make_plan(problem, posterior(), lambda _: "no")


def test_all_of_a_plan_is_in_its_document_and_in_words(problem):
    planned = make_plan(problem, posterior())
    document = to_document(planned)
    assert document["choice"]["plan"] == planned.candidate.describe()
    assert document["choice"]["answer"]["step_s"] == pytest.approx(document["choice"]["step_s"])
    assert sum(document["choice"]["answer"]["terms"].values()) == pytest.approx(document["choice"]["step_s"])
    assert len(document["front"]) == len(planned.choice.front)
    assert all(one["step_s_low"] < one["step_s"] < one["step_s_high"] for one in document["front"])
    assert (document["choice"]["money"], document["choice"]["money_high"]) == (None, None)
    assert answer_rows([problem.row_of(planned.candidate)])["rows"][0]["step_s"] == pytest.approx(
        document["choice"]["step_s"]
    )
    words = "\n".join([*describe_choice(planned), *(describe_what_if(x, planned.candidate) for x in planned.what_ifs)])
    assert "bound by" in words
    assert "twice the bandwidth between hosts: -" in words


@pytest.mark.parametrize(
    ("ratio", "words"), [(0.998, "no change"), (1.002, "no change"), (0.9, "-10%"), (1.5, "+50%"), (30.0, "30 times")]
)
def test_a_change_that_rounds_to_nothing_is_none(ratio, words):
    assert describe_change(ratio) == words


def test_what_a_change_would_bring_is_said_of_this_plan_and_of_another_only_if_that_is_something(choice):
    chosen, other = (choice.pool.needs[one].candidate for one in (choice.index, choice.index - 1))
    assert describe_what_if(WhatIf("more", 0.999, other, 1.001), chosen) == "more: no change"
    assert describe_what_if(WhatIf("more", 0.9, chosen, 0.8), chosen) == "more: -10% with this plan"
    assert describe_what_if(WhatIf("more", None, other, 0.8), chosen) == (
        f"more: -20% from the best now to the best then ({other.describe()})"
    )
