"""Runs on one fleet: timetables against looking at all start times, laws, and curves against plans of single runs."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import make_machines, make_problem, posterior

from paceline.errors import SettingsError
from paceline.planner.fleet import Fleet, Option, come_first, divide_evenly, place
from paceline.planner.fleet_planning import FleetRun, make_curve, make_fleet, plan_fleet
from paceline.planner.fleet_search import FleetLimits, bound_end, search
from paceline.planner.fleet_words import describe_fleet, name_runs, to_document
from paceline.planner.planning import make_plan


def look_at_all(num_ranks, curves, limits, by):
    """Return the least (money, energy or nothing, end) over all options and all whole start times, None if none keeps.

    Times are whole numbers, so that some best timetable begins all runs at whole times.
    """
    best = None
    for options in itertools.product(*curves):
        money, energy_j = sum(one.money for one in options), sum(one.energy_j for one in options)
        if limits.budget is not None and money > limits.budget:
            continue
        if limits.energy_j is not None and energy_j > limits.energy_j:
            continue
        horizon = int(sum(one.time_s for one in options))
        for starts in itertools.product(range(horizon), repeat=len(options)):
            entries = [(start, start + one.time_s, one.num_ranks) for start, one in zip(starts, options, strict=True)]
            end_s = max(end for _, end, _ in entries)
            key = (*{"time": (), "money": (money,), "energy": (energy_j,)}[by], end_s)
            if (best is not None and key >= best) or (limits.within_s is not None and end_s > limits.within_s):
                continue
            if all(sum(n for start, end, n in entries if start <= now < end) <= num_ranks for now in starts):
                best = key
    return best


def make_curves(rng, fleet, num_runs=3):
    curves = []
    for _ in range(num_runs):
        time_s, options = rng.randint(2, 4), []
        for size in fleet.sizes:
            time_s = max(1, time_s - rng.randint(0, 2))
            if not options or time_s < options[-1].time_s:
                options.append(Option(size, time_s, money=size * time_s, energy_j=time_s * (size + 2)))
        curves.append(tuple(options))
    return curves


FLEETS = (Fleet(1, 2), Fleet(1, 4), Fleet(2, 2), Fleet(2, 4), Fleet(3, 2, can_divide_hosts=False))


@pytest.mark.parametrize("seed", range(40))
def test_the_best_timetable_is_that_of_looking_at_all_start_times(seed):
    rng = random.Random(seed)
    fleet = FLEETS[seed % len(FLEETS)]
    curves = make_curves(rng, fleet)
    found = search(fleet, curves, FleetLimits())
    assert found.is_proven
    assert (found.timetable.end_s,) == pytest.approx(look_at_all(fleet.num_ranks, curves, FleetLimits(), "time"))
    assert found.bound_s <= found.timetable.end_s


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("by", ["money", "energy"])
def test_limits_are_kept_by_the_cheapest_and_where_none_keeps_them_there_is_none(seed, by):
    rng = random.Random(seed)
    fleet = FLEETS[seed % 2]
    curves = make_curves(rng, fleet)
    limits = FleetLimits(within_s=rng.randint(2, 8), budget=rng.choice([None, 14.0]), energy_j=rng.choice([None, 24.0]))
    found = search(fleet, curves, limits, by)
    wanted = look_at_all(fleet.num_ranks, curves, limits, by)
    assert found.is_proven
    if wanted is None:
        assert found.timetable is None
        return
    value = {"money": found.timetable.money, "energy": found.timetable.energy_j}[by]
    assert (value, found.timetable.end_s) == pytest.approx(wanted)
    assert limits.keeps(found.timetable)


ORDERS = st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 10.0)), min_size=1, max_size=6)


@given(ORDERS)
@settings(max_examples=60)
def test_no_rank_has_two_runs_at_once_and_parts_of_a_host_are_of_one(chosen):
    fleet = Fleet(3, 4)
    curves = [tuple(Option(size, time_s / size) for size in fleet.sizes) for _, time_s in chosen]
    timetable = place(fleet, curves, tuple((run, number) for run, (number, _) in enumerate(chosen)))
    held = [(entry, timetable.list_ranks(entry)) for entry in timetable.entries]
    for entry, ranks in held:
        size = curves[entry.run][entry.option].num_ranks
        assert len(set(ranks)) == size
        assert len({rank // 4 for rank in ranks}) == max(1, size // 4)
    for (one, ranks), (other, others) in itertools.combinations(held, 2):
        if set(ranks) & set(others):
            assert one.end_s <= other.begin_s or other.end_s <= one.begin_s
    times = np.array([[entry.end_s - entry.begin_s] for entry in timetable.entries])
    assert timetable.retime(times)[:, 0] == pytest.approx([entry.end_s for entry in timetable.entries])
    assert (timetable.retime(1.5 * times) >= timetable.retime(times)).all()


def test_even_split_and_first_come_are_what_they_say():
    fleet = Fleet(1, 4)
    curves = [(Option(1, 8.0), Option(2, 4.0), Option(4, 2.0)), (Option(1, 6.0), Option(2, 5.0))]
    even, first = divide_evenly(fleet, curves), come_first(fleet, curves)
    assert [(entry.begin_s, entry.end_s) for entry in even.entries] == [(0.0, 4.0), (0.0, 5.0)]
    assert [(entry.begin_s, entry.end_s) for entry in first.entries] == [(0.0, 2.0), (2.0, 7.0)]
    assert first.list_before(first.entries[1]) == [0]
    assert divide_evenly(Fleet(1, 1), [(Option(1, 1.0),)] * 2) is None


def test_runs_that_scale_are_put_in_order_the_shortest_first_and_runs_that_do_not_share():
    fleet = Fleet(1, 4)
    scaling = [tuple(Option(size, work / size) for size in (1, 2, 4)) for work in (40.0, 8.0)]
    found = search(fleet, scaling, FleetLimits())
    assert found.timetable.end_s == pytest.approx(12.0)
    assert [entry.run for entry in sorted(found.timetable.entries, key=lambda entry: entry.begin_s)] == [1, 0]
    alone = [(Option(1, 5.0),)] * 4
    shared = search(fleet, alone, FleetLimits()).timetable
    assert {entry.begin_s for entry in shared.entries} == {0.0}
    assert len({entry.units for entry in shared.entries}) == 4


@pytest.mark.parametrize("num_hosts", [1, 4])
def test_many_runs_end_no_later_than_simple_timetables_do_and_no_sooner_than_they_can(num_hosts):
    fleet = Fleet(num_hosts, 8)
    rng = random.Random(1)
    curves = [
        tuple(Option(size, rng.uniform(5, 50) / min(size, limit) ** 0.9) for size in fleet.sizes[:1])
        + tuple(Option(size, 4.0 / size**0.8) for size in fleet.sizes[1:])
        for limit in range(2, 12)
    ]
    found = search(fleet, curves, FleetLimits(), most_nodes=2000)
    assert found.num_nodes > 2000 or found.is_proven
    simple = [divide_evenly(fleet, curves), come_first(fleet, curves)]
    assert bound_end(fleet, curves) <= found.timetable.end_s <= min(one.end_s for one in simple if one is not None)
    assert sorted(entry.run for entry in found.timetable.entries) == list(range(10))


def make_runs(machines, *problems, trial=lambda _: ""):
    return [
        FleetRun(f"run{number}", make_problem(machines, **problem), trial) for number, problem in enumerate(problems)
    ]


LARGE = {
    "model": {"name": "decoder", "num_layers": 3, "width": 2048, "num_heads": 16, "vocabulary": 32000},
    "num_steps": 1000, "global_batch": 16,
}  # fmt: skip
SMALL = {
    "model": {"name": "decoder", "num_layers": 1, "width": 256, "num_heads": 4, "vocabulary": 1000},
    "num_steps": 3000, "global_batch": 8, "tokens": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def planned():
    return plan_fleet(make_runs(make_machines(price=20.0), LARGE, SMALL, SMALL), posterior(), FleetLimits())


def test_each_option_of_a_curve_is_the_plan_of_so_many_ranks(planned):
    curve = planned.curves[0]
    assert [option.num_ranks for option in curve.options] == [1, 2, 4, 8]
    for option, choice in list(zip(curve.options, curve.choices, strict=True))[::2]:
        alone = make_plan(make_problem(make_machines(num_ranks=option.num_ranks), **LARGE), posterior())
        assert choice.needs.candidate == alone.candidate
        assert option.time_s == pytest.approx(1000 * alone.choice.objectives[alone.choice.index, 0])
        assert option.money == pytest.approx(20 * option.num_ranks / 8 * option.time_s / 3600)


def test_small_runs_share_a_host_with_a_large_one_and_all_is_said(planned):
    assert planned.found.is_proven
    best = planned.best
    assert best.end_s[0] <= min(other.end_s[0] for other in planned.others.values())
    assert best.end_s[1] < best.end_s[0] < best.end_s[2]
    even = planned.others["even split"]
    assert even.ratio[0] == pytest.approx(even.end_s[0] / best.end_s[0])
    # What is uncertain of both alike cancels.
    assert even.ratio[2] / even.ratio[1] < best.end_s[2] / best.end_s[1]
    words = "\n".join(describe_fleet(planned))
    assert "fleet: 8 ranks of dgx_a100 on 1 host, for 3 runs" in words
    assert "by estimate no other order of runs that hold such ranks to their end ends sooner" in words
    assert all(f"  {curve.run.name}: " in words for curve in planned.curves)
    document = to_document(planned, ["a", "b", "c"])
    assert document["end_s"] == best.end_s[0]
    assert sum(run["money"] for run in document["runs"]) == pytest.approx(document["money"])
    assert document["money_low"] < document["money"] < document["money_high"]
    assert document["energy_j_high"] / document["energy_j"] > document["end_s_high"] / document["end_s"]
    assert [run["file"] for run in document["runs"]] == ["a", "b", "c"]
    assert document["compared"]["even split"]["is_tie"] == even.is_tie


def test_a_timetable_that_differs_by_less_than_is_known_is_a_tie():
    planned = plan_fleet(make_runs(make_machines(num_ranks=2), LARGE, LARGE), posterior(), FleetLimits())
    assert planned.others["even split"].is_tie
    assert ": a tie, the difference is less than is known" in "\n".join(describe_fleet(planned))


def test_plans_that_training_refuses_are_on_no_curve():
    machines = make_machines(num_ranks=2)
    (run,) = make_runs(machines, LARGE, trial=lambda one: "no" if one.division.num_ranks > 1 else "")
    assert [option.num_ranks for option in make_curve(run, posterior(), make_fleet(machines)).options] == [1]
    (free,) = make_runs(machines, LARGE)
    assert [option.num_ranks for option in make_curve(free, posterior(), make_fleet(machines)).options] == [1, 2]


def test_what_fits_nowhere_and_limits_that_nothing_keeps_are_said():
    machines = make_machines(num_ranks=1, price=20.0)
    huge = {"model": {"name": "decoder", "num_layers": 96, "width": 12288, "num_heads": 96}, "num_steps": 1}
    with pytest.raises(SettingsError, match=r"run1: nothing fits: the nearest needs"):
        plan_fleet(make_runs(machines, SMALL, huge), posterior(), FleetLimits())
    with pytest.raises(
        SettingsError, match=r"nothing keeps the limits: of all runs the soonest end of all is after .* h"
    ):
        plan_fleet(make_runs(machines, SMALL, SMALL), posterior(), FleetLimits(within_s=1.0))
    with pytest.raises(SettingsError, match=r"the least money \d\.?\d*;"):
        plan_fleet(make_runs(machines, SMALL, SMALL), posterior(), FleetLimits(budget=1e-6))


def test_within_a_limit_of_time_the_cheapest_is_taken_and_its_doubt_is_said(planned):
    slow = 3 * planned.best.end_s[0]
    runs = [curve.run for curve in planned.curves[:2]]
    cheap = plan_fleet(runs, posterior(), FleetLimits(within_s=slow))
    assert cheap.by == "money"
    assert cheap.best.money[0] < planned.best.money[0]
    assert planned.best.end_s[0] < cheap.best.end_s[0] <= slow
    free = replace(cheap, limits=FleetLimits(within_s=100 * slow))
    assert not any("beyond" in line for line in describe_fleet(free))
    near = FleetLimits(within_s=1.01 * cheap.best.end_s[0], budget=1.01 * cheap.best.money[0])
    words = describe_fleet(replace(cheap, limits=near))
    assert sum("the upper end of the interval of" in line for line in words) == 2


def test_hosts_whose_processors_compute_are_not_divided_and_ranks_are_of_whole_hosts():
    on_cpus = make_machines("switch", 4, device="cpu", devices_per_host=2)
    assert make_fleet(on_cpus).sizes == (2, 4)
    assert make_fleet(make_machines(num_ranks=16)).sizes == (1, 2, 4, 8, 16)
    assert make_fleet(make_machines(num_ranks=4)).sizes == (1, 2, 4)
    assert Fleet(20, 8).sizes == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160)
    with pytest.raises(SettingsError, match=r"--num_ranks must be of whole hosts for several runs, but got 12 = 1 x 8"):
        make_fleet(make_machines(num_ranks=12))


def test_runs_of_one_name_are_numbered():
    assert name_runs(["/a/x.py:run", "/b/y.py:run", "/c/x.py:run"]) == ["x.py:run #1", "y.py:run", "x.py:run #2"]
