"""The front, against its definition; and the choice of small problems, against looking at all candidates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import make_machines, make_problem, posterior, price

from paceline.errors import SettingsError
from paceline.planner.choice import choose
from paceline.planner.front import find_front
from paceline.planner.planning import describe_choice, make_plan, to_document


def find_slowly(objectives):
    """Return the front by its definition: each row compared with each."""
    rows = [tuple(row) for row in objectives]
    beaten = [
        any(all(a <= b for a, b in zip(other, row, strict=True)) and other != row for other in rows) for row in rows
    ]
    return [index for index, is_beaten in enumerate(beaten) if not is_beaten]


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=1, max_size=40))
def test_the_front_is_what_no_other_row_beats(rows):
    objectives = np.array(rows, dtype=float)
    assert find_front(objectives).tolist() == find_slowly(objectives)


def is_best(choice, kept, column):
    """Return whether a choice is the best of some, or undivided and so near that nobody knows which is better."""
    values, best = choice.objectives[:, column], kept[np.argmin(choice.objectives[kept, column])]
    if values[choice.index] <= 1.01 * values[best]:
        return True
    spread = choice.pool.ratio_spreads([choice.index, best])[0, 1]
    is_tie = np.log(values[choice.index] / values[best]) <= 1.01 * 1.645 * spread
    return is_tie and choice.needs.candidate.division.ranks_of_worker == 1


def test_the_front_and_the_choice_of_a_small_problem_are_those_of_looking_at_all():
    problem = make_problem(make_machines(price=20.0), make_machines("dgx1", price=1.0))
    pool, least = price(problem)
    choice = choose(pool, least)
    objectives, fits = pool.objectives(), np.flatnonzero(pool.fits)
    assert 500 < len(fits) < len(pool.needs)
    assert sorted(choice.front) == fits[find_slowly(objectives[fits])].tolist()
    assert is_best(choice, fits, 0)
    assert {pool.needs[one].candidate.machines for one in choice.front} == {0, 1}
    times = objectives[list(choice.front), 0]
    assert (np.diff(times) >= 0).all()


def test_a_limit_of_time_asks_for_the_cheapest_that_keeps_it_and_one_of_money_for_the_fastest():
    machines = make_machines(price=20.0), make_machines("dgx1", price=1.0)
    free = make_problem(*machines, num_steps=1000)
    pool, least = price(free)
    fastest = choose(pool, least)
    best_s = 1000 * fastest.objectives[fastest.index, 0]
    kept = make_problem(*machines, num_steps=1000, within_s=30 * best_s)
    cheap = choose(*price(kept))
    objectives, fits = cheap.objectives, np.flatnonzero(cheap.pool.fits)
    slow_enough = fits[objectives[fits, 0] * 1000 <= 30 * best_s]
    assert cheap.by == "money"
    assert is_best(cheap, slow_enough, 1)
    assert objectives[cheap.index, 0] > fastest.objectives[fastest.index, 0]
    spent = 1000 * objectives[cheap.index, 1]
    bounded = choose(*price(make_problem(*machines, num_steps=1000, budget=1.1 * spent)))
    affordable = fits[objectives[fits, 1] * 1000 <= 1.1 * spent]
    assert is_best(bounded, affordable, 0)
    assert bounded.objectives[bounded.index, 1] * 1000 <= 1.1 * spent


ENDS = ("", "_low", "_high")


def test_money_energy_and_carbon_have_intervals_money_that_of_time_and_energy_a_wider_one():
    problem = make_problem(make_machines(price=20.0), num_steps=1000, budget=1e6)
    planned = make_plan(problem, posterior())
    document = to_document(planned)
    for one in (document["choice"], *document["front"]):
        times, money, energy, carbon, memory = (
            np.array([one[f"{name}{end}"] for end in ENDS])
            for name in ("step_s", "money", "energy_j", "carbon_kg", "memory_bytes")
        )
        hours = times * one["num_hosts"] / 3600
        np.testing.assert_allclose(money, 20 * hours)
        np.testing.assert_allclose(carbon, [problem.site.carbon_kg(value) for value in energy])
        assert energy[0] / energy[1] > times[0] / times[1] > 1.01
        assert energy[2] / energy[0] == pytest.approx(energy[0] / energy[1])
        assert memory[1] < memory[0] < memory[2]
    words = "\n".join(describe_choice(planned))
    answer = planned.answer
    energy_kwh = [answer[f"energy_j{end}"] * 1000 / 3.6e6 for end in ENDS]
    assert f"{energy_kwh[0]:.4g} ({energy_kwh[1]:.3g} to {energy_kwh[2]:.3g}) kWh" in words
    hours = [answer[f"step_s{end}"] * 1000 / 3600 for end in ENDS]
    assert f"({20 * hours[1]:.3g} to {20 * hours[2]:.3g}) in the price's currency" in words
    assert "beyond" not in words


@pytest.mark.parametrize("limit", ["within_s", "budget", "energy_j"])
def test_a_plan_says_where_the_upper_end_of_an_interval_is_beyond_a_limit(limit):
    machines = make_machines(price=20.0)
    pool, least = price(make_problem(machines, num_steps=1000))
    best = choose(pool, least)
    estimate = dict(zip(("within_s", "budget", "energy_j"), 1000 * best.objectives[best.best, :3], strict=True))
    problem = make_problem(machines, num_steps=1000, **{limit: 1.02 * estimate[limit]})
    line = next(line for line in describe_choice(make_plan(problem, posterior())) if line.startswith("run of"))
    assert "the upper end of its interval is beyond the " in line


def test_hardware_that_no_row_knows_has_the_wide_interval_of_its_answer_on_the_front_too():
    device = {"peak_flops": {"fp32": 2e13, "bf16": 3e14}, "memory_bytes": 8e10, "memory_speed": 2e12, "num_cores": 108}
    planned = make_plan(make_problem(make_machines("switch", 4, device=device)), posterior())
    document, answer = to_document(planned), planned.answer
    assert answer["basis"] == "specification"
    assert answer["step_s_high"] / answer["step_s"] > 1.4
    for name in ("step_s", "energy_j"):
        assert document["choice"][f"{name}_high"] == pytest.approx(answer[f"{name}_high"])


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ({"memory_bytes": 1e9}, r"nothing fits: the nearest needs 3.* GB a rank .* of 1 GB on dgx_a100: 8 ranks"),
        (
            {"within_s": 1.0},
            r"nothing keeps the limits: the nearest takes .* \(.* to .*\) h, .* \(.* to .*\) kWh, .* times what is",
        ),
        ({"energy_j": 1.0}, r"nothing keeps the limits: .* kWh"),
    ],
)
def test_without_any_that_fits_the_nearest_is_named(problem, words):
    limits = {name: value for name, value in problem.items() if name != "memory_bytes"}
    machines = make_machines(memory_bytes=problem.get("memory_bytes"))
    pool, least = price(make_problem(machines, num_steps=1000, **limits))
    with pytest.raises(SettingsError, match=words):
        choose(pool, least)


def test_limits_that_cannot_be_judged_are_refused():
    with pytest.raises(SettingsError, match="--num_steps must be given with a limit"):
        make_problem(within_s=1.0)
    with pytest.raises(SettingsError, match="--budget must go with a price of each cluster, but dgx_a100 has none"):
        make_problem(num_steps=10, budget=1.0)
    with pytest.raises(SettingsError, match="--within must be more than 0, but got -1"):
        make_problem(num_steps=10, within_s=-1.0)


def test_a_model_is_divided_only_where_that_is_surely_faster():
    tiny = {"name": "decoder", "num_layers": 8, "width": 128, "num_heads": 2, "vocabulary": 1000}
    pool, least = price(make_problem(model=tiny, tokens=64, global_batch=8))
    choice = choose(pool, least)
    assert choice.needs.candidate.division.ranks_of_worker == 1
    large = {"name": "decoder", "num_layers": 16, "width": 8192, "num_heads": 64}
    pool, least = price(make_problem(make_machines("dgx_a100", 8), model=large, tokens=1024, global_batch=2))
    assert choose(pool, least).needs.candidate.division.ranks_of_worker > 1  # two samples are too few for eight workers


def test_a_plainer_choice_says_what_is_better_and_is_not_said_to_be_on_the_front():
    small = {"name": "decoder", "num_layers": 8, "width": 1024, "num_heads": 8, "vocabulary": 1000}
    found = make_plan(make_problem(make_machines(num_ranks=4), model=small, tokens=256, global_batch=4), posterior())
    choice, objectives = found.choice, found.choice.objectives
    least_s = objectives[np.flatnonzero(choice.pool.fits), 0].min()
    assert objectives[choice.best, 0] == least_s < objectives[choice.index, 0]
    better = (
        f"taken as the plainest of a tie: {choice.pool.needs[choice.best].candidate.describe()} is "
        f"{objectives[choice.index, 0] / least_s - 1:.1%} faster by estimate, less than is known"
    )
    assert better in describe_choice(found)
    assert to_document(found)["better"] == better
    assert choice.index not in choice.front
    assert set(choice.shown) <= set(choice.front)
    best = make_plan(make_problem(make_machines(num_ranks=2), global_batch=4), posterior())
    assert best.choice.index == best.choice.best in best.choice.shown
    assert to_document(best)["better"] is None
