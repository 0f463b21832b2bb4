"""Trials of runs that fail: equal to closed forms where there are any, and to scripts of events where there are not."""

from dataclasses import replace
from math import exp, expm1, inf

import numpy as np
import pytest

from paceline.errors import SettingsError
from paceline.simulator.failures import (
    Exponential,
    FailureTrace,
    Never,
    TrialSettings,
    Weibull,
    find_optimal_interval_s,
    find_young_interval_s,
    run_trials,
)

HOUR_S = 3600.0


def make(**changes):
    return TrialSettings(**({"work_s": 10 * HOUR_S, "num_hosts": 4, "failures": Never()} | changes))


def write_trace(tmp_path, times, kinds=None, header="time_s,kind"):
    file = tmp_path / "trace.csv"
    kinds = kinds or ["failure"] * len(times)
    file.write_text("\n".join([header, *(f"{t},{k}" for t, k in zip(times, kinds, strict=True))]) + "\n")
    return str(file)


def test_without_failures_a_run_takes_its_work_and_its_saves():
    plain = run_trials(make(), 10, 0)
    assert (plain.duration_s == 10 * HOUR_S).all()
    assert plain.has_ended.all()
    saving = run_trials(make(interval_s=HOUR_S, save_s=60.0), 10, 0)
    assert (saving.duration_s == 10 * HOUR_S + 9 * 60).all(), "no save follows the end"
    slow = run_trials(make(overhead=0.02), 10, 0)
    np.testing.assert_allclose(slow.duration_s, 10.2 * HOUR_S)


@pytest.mark.parametrize(
    ("mtbf_hours", "restart_s", "interval_s", "save_s"),
    [(8.0, 600.0, 1800.0, 60.0), (2.0, 1800.0, 600.0, 30.0), (40.0, 0.0, 3600.0, 300.0)],
)
def test_the_mean_is_dalys(mtbf_hours, restart_s, interval_s, save_s):
    """Each segment takes M exp(R/M) (exp(L/M) - 1), failures while restarting included."""
    settings = make(
        failures=Exponential(mtbf_hours=4 * mtbf_hours),
        detection_s=0.25 * restart_s,
        restart_s=0.75 * restart_s,
        interval_s=interval_s,
        save_s=save_s,
    )
    found = run_trials(settings, 20_000, 1).duration_s
    mean_s = mtbf_hours * HOUR_S
    num_segments = round(settings.work_s / interval_s)
    segments = (num_segments - 1) * expm1((interval_s + save_s) / mean_s) + expm1(interval_s / mean_s)
    expected_s = mean_s * exp(restart_s / mean_s) * segments
    assert abs(found.mean() - expected_s) < 4 * found.std() / np.sqrt(len(found))


@pytest.mark.parametrize(("save_s", "mtbf_hours"), [(5.0, 4.0), (60.0, 2.0), (120.0, 24.0)])
def test_dalys_interval_is_as_good_as_the_best_that_is_simulated(save_s, mtbf_hours):
    base = make(
        work_s=200 * HOUR_S, num_hosts=1, failures=Exponential(mtbf_hours=mtbf_hours), restart_s=300.0, save_s=save_s
    )
    closed_s = find_optimal_interval_s(save_s, mtbf_hours * HOUR_S)
    means = {
        factor: run_trials(replace(base, interval_s=factor * closed_s), 300, 2).duration_s.mean()
        for factor in (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0)
    }
    assert means[1.0] <= 1.02 * min(means.values())
    assert means[0.25] > 1.01 * means[1.0]
    assert means[4.0] > 1.01 * means[1.0]
    young = replace(base, interval_s=find_young_interval_s(save_s, mtbf_hours * HOUR_S))
    assert run_trials(young, 300, 2).duration_s.mean() <= 1.02 * min(means.values())


def test_saves_that_cost_nothing_are_made_all_the_time_and_lose_no_work():
    assert find_optimal_interval_s(0.0, HOUR_S) == find_young_interval_s(0.0, HOUR_S) == 0.0
    found = run_trials(make(failures=Exponential(mtbf_hours=8.0), interval_s=0.0, restart_s=100.0), 2000, 0)
    np.testing.assert_allclose(found.duration_s, 10 * HOUR_S + found.down_s)
    assert found.num_failures.mean() == pytest.approx(5, rel=0.1)
    assert find_optimal_interval_s(60.0, inf) == inf
    always = make(interval_s=0.0, write_s=200.0, overhead=0.25)
    assert always.saved_after(np.array([100.0, 1200.0])).tolist() == [0.0, 800.0], "what is not written yet is lost"


def test_a_shape_of_one_is_exponential_and_rates_are_the_same_whatever_the_shape():
    settings = {"work_s": 200 * HOUR_S, "interval_s": HOUR_S, "save_s": 60.0, "restart_s": 600.0}
    times = {}
    for name, process in (
        ("exponential", Exponential(mtbf_hours=100)),
        ("one", Weibull(mtbf_hours=100, shape=1.0)),
        ("infant", Weibull(mtbf_hours=100, shape=0.7)),
        ("old", Weibull(mtbf_hours=100, shape=3.0)),
    ):
        found = run_trials(make(failures=process, **settings), 3000, 3)
        times[name] = found.duration_s
        rate = found.num_failures.sum() / found.duration_s.sum()
        assert rate == pytest.approx(4 / (100 * HOUR_S), rel=0.04), name
    spread = times["one"].std() / np.sqrt(3000)
    assert abs(times["one"].mean() - times["exponential"].mean()) < 5 * spread
    assert times["infant"].std() > times["one"].std() > times["old"].std()


def test_a_trace_is_replayed_as_it_is_from_a_random_moment(tmp_path):
    trace = FailureTrace(path=write_trace(tmp_path, [1000, 1500]), length_hours=1)
    assert trace.mean_gap_s(99) == 1800
    arrivals = trace.start(np.random.default_rng(0), 500, 1)
    first = arrivals.next_s.copy()
    assert (first >= 0).all()
    assert (first <= 3100).all()
    trials = np.arange(500)
    gaps = []
    for _ in range(4):
        before = arrivals.next_s.copy()
        arrivals.advance(trials)
        gaps.append(arrivals.next_s - before)
    assert set(np.round(np.concatenate(gaps))) == {500, 3100}
    np.testing.assert_allclose(gaps[0] + gaps[1], 3600)
    told = FailureTrace(path=trace.path, length_hours=1, begin_s=1200).start(np.random.default_rng(0), 5, 1)
    assert (told.next_s == 300).all()
    kinds = write_trace(tmp_path, [10, 20, 30], ["failure", "preemption", "failure"])
    assert len(FailureTrace(path=kinds, kind="preemption").read()[0]) == 1


@pytest.mark.parametrize(
    ("times", "header", "message"),
    [
        ([2, 1], "time_s,kind", "in order, from 0 to its length, but .* has 2"),
        ([-1, 1], "time_s,kind", "in order"),
        ([], "time_s,kind", "but .* has 0, and a length of 0 s"),
        ([1], "when,kind", "must have a column time_s of numbers"),
        (["soon"], "time_s,kind", "must have a column time_s of numbers"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path, times, header, message):
    with pytest.raises(ValueError, match=message):
        FailureTrace(path=write_trace(tmp_path, times, header=header))
    with pytest.raises(ValueError, match="a trace must be a CSV file that can be read"):
        FailureTrace(path=str(tmp_path / "nowhere.csv"))


def every(tmp_path, gap_s, kind="failure"):
    return FailureTrace(path=write_trace(tmp_path, [gap_s], [kind]))


def test_what_a_failure_leaves_is_the_last_save_that_could_be_used(tmp_path):
    """Events come every 1,000 s; a cycle takes 310 s, so that three are saved, and the rest is lost."""
    base = make(work_s=3000.0, failures=every(tmp_path, 1000.0), interval_s=300.0, save_s=10.0)
    found = run_trials(base, 50, 0)
    first_s = base.failures.start(np.random.default_rng(0).spawn(3)[0], 50, 4).next_s
    saved = 300 * np.floor(first_s / 310)
    left = 3000 - saved
    full = np.ceil(left / 900 - 1e-9) - 1  # stretches between events, of which the last is ended
    rest = left - 900 * full
    np.testing.assert_allclose(found.duration_s, first_s + 1000 * full + rest + 10 * (np.ceil(rest / 300 - 1e-9) - 1))
    late = run_trials(replace(base, write_s=200.0), 50, 0)
    assert (late.duration_s >= found.duration_s).all()
    assert late.duration_s.mean() > 1.1 * found.duration_s.mean(), "a save that cannot be used yet is lost too"


def test_a_notice_that_is_long_enough_saves_the_work(tmp_path):
    spot = make(work_s=5000.0, preemptions=every(tmp_path, 1000.0), interval_s=400.0, save_s=10.0, restart_s=50.0)
    by_notice = {s: run_trials(replace(spot, notice_s=s), 50, 0).duration_s.mean() for s in (0.0, 9.9, 10.0, 120.0)}
    assert by_notice[0.0] == by_notice[9.9] > 1.05 * by_notice[10.0]
    assert by_notice[10.0] == by_notice[120.0]
    unsaved = run_trials(make(work_s=5000.0, preemptions=spot.preemptions, notice_s=20.0, save_s=10.0), 50, 0)
    np.testing.assert_allclose(unsaved.duration_s, 5000 + 10 * unsaved.num_preemptions)


def test_a_run_whose_failures_come_faster_than_its_saves_never_ends(tmp_path):
    found = run_trials(make(work_s=5000.0, failures=every(tmp_path, 1000.0)), 20, 0)
    assert not found.has_ended.any()


def spot_run(**changes):
    return make(
        preemptions=Exponential(mtbf_hours=4.0),
        notice_s=120.0,
        interval_s=600.0,
        save_s=10.0,
        restart_s=120.0,
        wait_s=1800.0,
        **changes,
    )


def test_all_time_is_paid_as_spot_or_on_demand_or_waited_for():
    for settings in (spot_run(), spot_run(deadline_s=14 * HOUR_S, failures=Exponential(mtbf_hours=50))):
        found = run_trials(settings, 500, 0)
        np.testing.assert_allclose(found.spot_s + found.on_demand_s + found.waiting_s, found.duration_s)
        assert (np.stack([found.spot_s, found.on_demand_s, found.waiting_s, found.down_s]) >= 0).all()


def test_on_demand_hosts_come_in_time_for_the_deadline():
    free = run_trials(spot_run(), 1000, 0)
    assert (free.on_demand_s == 0).all()
    deadline_s = float(np.percentile(free.duration_s, 30))
    bound = run_trials(spot_run(deadline_s=deadline_s), 1000, 0)
    assert (free.duration_s > deadline_s).mean() == pytest.approx(0.7, abs=0.01)
    assert (bound.duration_s <= deadline_s).all(), "without failures it is always met"
    share = bound.on_demand_s.sum() / bound.duration_s.sum()
    assert 0.05 < share < 0.95
    tight = run_trials(spot_run(deadline_s=10.19 * HOUR_S), 200, 0)
    assert (tight.on_demand_s > 0.9 * tight.duration_s).all(), "there is no time for spot hosts at all"


def test_the_same_seed_is_the_same_trials_and_another_is_not():
    settings = make(failures=Exponential(mtbf_hours=8.0), interval_s=600.0, save_s=5.0)
    one, same, other = (run_trials(settings, 50, seed).duration_s for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_more_states_than_fit_are_refused():
    with pytest.raises(SettingsError, match=r"num_trials x num_hosts must be at most 20,000,000 with weibull"):
        run_trials(make(failures=Weibull(), num_hosts=100_000), 1000, 0)
