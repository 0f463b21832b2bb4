"""Candidates that are run: the choice follows what was measured; noise, failures and unknown steps do not move it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from problems import make_machines, make_problem, posterior

from paceline.cli.overrides import apply_overrides
from paceline.errors import SettingsError
from paceline.planner.candidate import Candidate, Division
from paceline.planner.inexact import load_ways
from paceline.planner.measured import find_fastest, measure_best, summarise
from paceline.planner.planning import describe_choice, make_plan, to_document, to_plan

PLAIN = Candidate(0, Division(data=2), 1, "none", "fp32")
WAYS = {way.name: way for way in load_ways() if "adamw" in way.optimizers}


@pytest.fixture(scope="module")
def planned():
    return make_plan(make_problem(make_machines(num_ranks=2), global_batch=8), posterior())


def measure_with(planned, times):
    """Measure the best three, whose steps take `times`, by their order in the first round; return what ran too."""
    ran, order = [], {}

    def measure(one):
        ran.append(one.candidate)
        place = order.setdefault(one.candidate, len(order))
        found = times[place]
        if isinstance(found, str):
            raise SettingsError(found)
        return [9.0] * 3 + [found[len([each for each in ran if each == one.candidate]) - 1]] * 6

    return measure_best(planned, len(times), lambda _: "", measure), ran


def test_the_fastest_by_measurement_is_taken_and_shown_beside_what_was_predicted(planned):
    found, ran = measure_with(planned, [(1.0, 1.1), (0.5, 0.6), (0.7, 0.6)])
    assert ran == [*ran[:3], *reversed(ran[:3])]
    assert ran[0] == planned.candidate != found.candidate == ran[1]
    assert [one.rounds_s for one in found.measured] == [(1.0, 1.1), (0.5, 0.6), (0.7, 0.6)]
    assert [one.is_chosen for one in found.measured] == [False, True, False]
    words = describe_choice(found)
    line = f"measured: {found.candidate.describe()}: 0.5 and 0.6 s, predicted {found.answer['step_s']:.4g} s; chosen"
    assert line in words
    assert not any("by estimate" in one for one in words)
    assert to_plan(found, None, "").overrides == found.candidate.list_overrides()
    assert to_document(found)["measured"][1]["rounds_s"] == (0.5, 0.6)
    assert all(one.candidate != found.candidate for one in found.neighbours)
    assert found.neighbours != planned.neighbours


def test_a_difference_within_noise_is_a_tie_and_leaves_the_choice(planned):
    found, _ = measure_with(planned, [(1.0, 1.2), (0.9, 1.05)])
    assert found.candidate == planned.candidate
    assert [one.is_chosen for one in found.measured] == [True, False]


def test_what_fails_is_left_out_with_its_reason(planned):
    found, ran = measure_with(planned, ["it breaks", (0.9, 1.0)])
    assert found.candidate == ran[1] != planned.candidate
    assert len(ran) == 3
    assert "not measured: it breaks" in found.measured[0].describe()
    with pytest.raises(SettingsError, match="but none does: it breaks"):
        measure_with(planned, ["it breaks", "too"])


def test_refused_candidates_are_not_run(planned):
    ran = []

    def measure(one):
        ran.append(one.candidate)
        return [1.0] * 9

    measure_best(planned, 3, lambda one: "no" if one.recompute != "none" else "", measure)
    assert {one.recompute for one in ran} == {"none"}
    assert len(set(ran)) == 3


def test_steps_of_a_rule_count_by_whole_periods_and_by_the_steps_to_the_same_loss():
    diloco = replace(PLAIN, way=WAYS["diloco, period 16"])
    assert summarise([5.0, 4.0, 3.0, 1.0, 1.0, 9.0], PLAIN) == 1.0
    assert summarise([7.0] * 16 + ([1.0] * 15 + [17.0]) * 2 + [1.0], diloco) == 2.0
    for candidate in (PLAIN, diloco):
        with pytest.raises(SettingsError, match="more steps to be measured, but had 3"):
            summarise([1.0] * 3, candidate)
    assert find_fastest([PLAIN, replace(PLAIN, num_micro_batches=2)], [[1.0, 1.1], [0.95, 0.97]]) == 1
    assert find_fastest([PLAIN, diloco], [[1.0, 1.1], [0.95, 0.97]]) == 0
    assert find_fastest([PLAIN, diloco], [[1.0, 1.1], [0.1, 0.1]]) == 1


def test_a_run_that_is_measured_keeps_and_tells_nothing():
    from paceline.cli.plan_measure import count_steps, list_options
    from paceline.cli.prepare import make_run

    run = make_run("transformer_lm", [("stop_after", "3"), ("checkpoint_url", "/no/where")])
    options = list_options(run, [("stop_after", "3"), ("model.width", "16")])
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    changed = apply_overrides(run, [(name.removeprefix("--"), value) for name, value in pairs.items()])
    assert (changed.checkpoint_url, changed.stop_after, changed.evaluate_interval) == (None, None, 0)
    assert pairs["--model.width"] == "16"
    assert (pairs["--stop_after"], pairs["--evaluate_interval"], pairs["--checkpoint_interval"]) == ("none", "0", "0")
    fast, slow = (SimpleNamespace(candidate=PLAIN, answer={"step_s": one}) for one in (0.01, 9.0))
    assert (count_steps(fast), count_steps(slow)) == (403, 9)
    rare = SimpleNamespace(candidate=replace(PLAIN, way=WAYS["diloco, period 16"]), answer={"step_s": 9.0})
    assert count_steps(rare) == 64
