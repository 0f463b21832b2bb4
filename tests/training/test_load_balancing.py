"""Shares that follow speed: how they are chosen, that noise leaves them alone, and what a run gains and keeps."""

import functools
import itertools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from test_loop import Points, losses_of, make_run, train_here
from torch import nn

from paceline.comm import LocalGroup
from paceline.data import Loader
from paceline.errors import CommunicationError
from paceline.monitor.events import SharesChanged, SlowWorker
from paceline.monitor.reader import read_log, select
from paceline.optim import SGD
from paceline.registry import register
from paceline.replica.step_result import BucketTimes, StepTimes
from paceline.sync import EveryStep, LocalSGD
from paceline.testing import faults, slow
from paceline.testing.slow import Scripted
from paceline.training import Classification, Model, session
from paceline.training.load_balancing import LEAST_GAIN, LoadBalancer, divide, find_slow, follow, measure
from paceline.training.run_queue import RunQueue
from scripted_time import ScriptedTime

always = settings(deadline=None, derandomize=True)


@register("test_plain")
class Plain(Model):
    """Without anything that depends on how a batch is divided."""

    def build(self, spec):
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 3))


class Stopped:
    """A clock that moves when it is told to."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


class Data:
    """Just a length: nobody reads it."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return float(index), 0


def pace(
    step_s,
    num_workers=4,
    num_steps=60,
    global_batch=40,
    num_samples=10_000,
    is_following=True,
    queued_s=lambda rank, step, num_samples: 0.0,
    **options,
):
    """Run steps in which a worker computes for ``step_s(rank, step, num_samples)``; return events and all shares.

    It waits for a core for ``queued_s(rank, step, num_samples)`` besides.
    """

    def worker(group):
        clock, queue, events, taken = Stopped(), Stopped(), [], []
        loader = Loader(Data(num_samples), global_batch, group=group, **options)
        load_balancer = LoadBalancer(
            loader, group, interval=5, is_following=is_following, clock=clock, queue_clock=queue
        )
        mine, number, batches = 0, 0, iter(loader)
        while number < num_steps:
            batch = next(batches)
            with load_balancer.computing(batch.num_samples):
                disturbance_s = queued_s(group.rank, number, batch.num_samples)
                queue.now_s += disturbance_s
                clock.now_s += step_s(group.rank, number, batch.num_samples) + disturbance_s
            clock.now_s += 100.0  # waiting is no computing
            mine += batch.num_samples
            if batch.last:
                loader.ack(batch)
                taken.append(mine)
                mine, number = 0, number + 1
                events += [(number, event) for event in load_balancer.end_step(number, StepTimes())]
        batches.close()
        return events, taken, loader.state_dict()

    results = LocalGroup.run(num_workers, worker)
    events = results[0][0]
    assert all(repr(result[0]) == repr(events) for result in results), "all workers come to the same"
    assert all(result[2] == results[0][2] for result in results)
    shares = list(zip(*(result[1] for result in results), strict=True))
    return events, shares


def of_kind(events, kind):
    return [event for _, event in events if isinstance(event, kind)]


@always
@given(
    sample_s=st.lists(st.floats(0.001, 10.0), min_size=1, max_size=4),
    extra=st.integers(0, 9),
)
def test_the_last_worker_is_done_as_soon_as_can_be(sample_s, extra):
    num_samples = len(sample_s) + extra
    shares = divide(num_samples, sample_s)
    assert sum(shares) == num_samples
    assert min(shares) >= 1
    ways = itertools.product(range(1, num_samples + 1), repeat=len(sample_s))
    best = min(max(n * s for n, s in zip(way, sample_s, strict=True)) for way in ways if sum(way) == num_samples)
    assert max(n * s for n, s in zip(shares, sample_s, strict=True)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("sample_s", "present", "expected"),
    [
        ([1, 1, 3, 1], [10, 10, 10, 10], [12, 12, 4, 12]),
        ([1, 1, 3, 1], [12, 12, 4, 12], None),
        ([1, 1.08, 0.95, 1.05], [10, 10, 10, 10], None),  # the slowest would gain a twentieth
        ([1, 1, 1, 1], [12, 12, 4, 12], [10, 10, 10, 10]),
        ([1, 1, 1000, 1], [10, 10, 10, 10], [13, 13, 1, 13]),
        ([1, math.nan, 3, 1], [10, 10, 10, 10], [12, 12, 4, 12]),
        ([math.nan] * 4, [10, 10, 10, 10], None),
        ([1, 1.4], [1, 1], None),  # two samples cannot be divided better
        ([1.0], [7], None),
    ],
)
def test_shares_follow_where_it_is_worth_it(sample_s, present, expected):
    assert follow(sample_s, present) == expected


@pytest.mark.parametrize(
    ("sample_s", "step_s", "expected"),
    [
        ([1, 1, 3, 1], [10, 10, 30, 10], {2: 3.0}),
        ([1, 1, 3, 1], [12, 12, 12, 12], {2: 3.0}),
        ([1, 1.4, 1, 1], [10, 14, 10, 10], {}),
        ([1, 1, 3, 1], [10, 10, 3, 10], {}),  # it has one sample, and each step costs something beside
        ([1, 2], [5, 10], {1: 2.0}),
        ([1, math.nan, 1, 5], [1, math.nan, 1, 5], {3: 5.0}),
        ([2, math.nan], [2, math.nan], {}),
        ([1, 1, 1, 1, 2, 4], [1, 1, 1, 1, 2, 4], {4: 2.0, 5: 4.0}),
    ],
)
def test_who_is_slow(sample_s, step_s, expected):
    assert find_slow(sample_s, step_s) == pytest.approx(expected)


def test_a_measurement_is_a_median_over_steps_that_had_samples():
    assert measure([(1.0, 10), (9.0, 10), (1.2, 10), (0.5, 0), (0.9, 10)]) == pytest.approx((0.11, 1.1))
    assert all(map(math.isnan, measure([(0.5, 0)] * 3)))
    assert measure([(0.0, 1)])[0] > 0, "a clock may be coarse, and speed is its inverse"


def test_shares_follow_a_slow_worker_and_come_back_when_it_recovers():
    events, shares = pace(lambda rank, step, num: num * (0.3 if rank == 2 and step < 30 else 0.1))
    changes = of_kind(events, SharesChanged)
    assert [change.shares for change in changes] == [[12, 12, 4, 12], [10, 10, 10, 10]]
    # Measured in steps 1..5 and 6..10, heard after 15; those that were read ahead keep their shares.
    assert shares[:15] == [(10, 10, 10, 10)] * 15
    assert changes[0].start in range(16 * 40, 20 * 40)
    assert shares[changes[0].start // 40 - 1 : changes[0].start // 40 + 1] == [(10, 10, 10, 10), (12, 12, 4, 12)]
    assert shares[-1] == (10, 10, 10, 10)
    assert changes[0].samples_per_s == pytest.approx([10, 10, 10 / 3, 10])
    (slow,) = of_kind(events, SlowWorker)
    assert (slow.slow_rank, slow.factor) == (2, pytest.approx(3.0))


def test_fixed_shares_stay_and_the_slow_worker_is_named_all_the_same():
    events, shares = pace(lambda rank, step, num: num * (0.1, 0.1, 0.1, 0.2)[rank], is_following=False)
    assert set(shares) == {(10, 10, 10, 10)}
    ((number, slow),) = events
    assert (number, slow.slow_rank, slow.factor) == (15, 3, pytest.approx(2.0))


@pytest.mark.parametrize("slow_steps", [{7}, {3, 21, 39}, set(range(5, 10)), set(range(13, 18))], ids=str)
def test_what_passes_triggers_nothing(slow_steps):
    """Single steps, and a spell as long as an interval, whether within one or across two."""
    events, shares = pace(lambda rank, step, num: num * (2.0 if rank == 1 and step in slow_steps else 0.1))
    assert events == []
    assert set(shares) == {(10, 10, 10, 10)}


@pytest.mark.parametrize("undisturbed", [0, 4, 7])
def test_a_worker_that_is_as_fast_in_one_step_of_ten_is_not_called_slow(undisturbed):
    """A busy machine disturbs most steps of whichever worker it likes."""
    events, _ = pace(lambda rank, step, num: num * (0.3 if rank == 1 and step % 10 != undisturbed else 0.1))
    assert of_kind(events, SlowWorker) == []
    assert of_kind(events, SharesChanged)


def test_time_in_which_others_have_the_core_makes_no_slow_worker_but_moves_shares():
    events, _ = pace(
        lambda rank, step, num: num * 0.1, queued_s=lambda rank, step, num: num * (0.2 if rank == 1 else 0)
    )
    assert of_kind(events, SlowWorker) == []
    assert of_kind(events, SharesChanged)[0].shares == [12, 4, 12, 12]
    # Whoever is slow is so on busy machines too.
    events, _ = pace(
        lambda rank, step, num: num * (0.3 if rank == 1 else 0.1), queued_s=lambda rank, step, num: num * 0.2
    )
    assert [(event.slow_rank, event.factor) for event in of_kind(events, SlowWorker)] == [(1, pytest.approx(3.0))]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count")
def test_waiting_for_a_core_is_counted():
    cores = os.sched_getaffinity(0)
    queue = RunQueue()
    try:
        os.sched_setaffinity(0, {min(cores)})
        rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same core
        try:
            began_s = queue()
            while queue() - began_s < 0.05:
                sum(range(1000))
        finally:
            rival.kill()
            rival.wait()
    finally:
        os.sched_setaffinity(0, cores)


def test_noise_does_not_move_shares():
    draws = [random.Random(rank) for rank in range(4)]
    events, _ = pace(lambda rank, step, num: num * 0.1 * draws[rank].lognormvariate(0, 0.1), num_steps=200)
    assert events == []


def test_shares_settle_where_each_step_costs_something_beside():
    """Then speed depends on the share; all take equally long in the end, but for what whole samples cannot do."""

    def step_s(rank, num):
        return 4.0 + num * (1.0, 1.0, 6.0, 1.0)[rank]

    events, shares = pace(lambda rank, step, num: step_s(rank, num), num_steps=150, global_batch=400)
    changes = [number for number, event in events if isinstance(event, SharesChanged)]
    assert len(changes) <= 4
    assert changes[-1] < 80, "it comes to rest"
    times = [step_s(rank, num) for rank, num in enumerate(shares[-1])]
    assert max(times) / min(times) < LEAST_GAIN


def test_a_worker_that_all_but_stands_still_keeps_a_sample():
    events, shares = pace(lambda rank, step, num: num * (1000.0 if rank == 0 and step < 20 else 0.1), num_steps=80)
    assert min(min(step) for step in shares) == 1
    assert shares[-1] == (10, 10, 10, 10)
    assert of_kind(events, SharesChanged)[0].shares[0] == 1


def test_short_batches_at_an_epochs_end_and_micro_batches_are_counted_right():
    events, shares = pace(lambda rank, step, num: num * (0.1, 0.1, 0.3, 0.1)[rank], num_samples=90, num_micro_batches=3)
    (change,) = of_kind(events, SharesChanged)
    assert change.shares == [12, 12, 4, 12]
    assert [sum(step) for step in shares] == [40, 40, 10] * 20
    assert shares[-3:] == [(12, 12, 4, 12), (12, 12, 4, 12), (3, 3, 1, 3)]


def test_data_too_small_for_all_workers_leaves_shares_alone():
    """Each global batch has two samples: two of the workers never compute, and nobody knows how fast they are."""
    events, shares = pace(lambda rank, step, num: num * (0.1, 0.3)[rank % 2], num_samples=2, global_batch=4)
    assert {sum(step) for step in shares} == {2}
    assert [event.slow_rank for event in of_kind(events, SlowWorker)] == [1]
    assert all(min(event.shares) >= 1 for event in of_kind(events, SharesChanged))


def step_by_hand(computed, numbers, interval=3):
    """Let two workers compute ``computed(rank, number)``, a time and a number of samples; return events by step."""

    def worker(group):
        clock = Stopped()
        load_balancer = LoadBalancer(
            Loader(Data(1000), 20, group=group), group, interval=interval, is_following=True, clock=clock
        )
        events = []
        for number in numbers:
            time_s, num_samples = computed(group.rank, number)
            with load_balancer.computing(num_samples):
                clock.now_s += time_s
            events += [(number, type(event)) for event in load_balancer.end_step(number, StepTimes())]
        return events

    events, others = LocalGroup.run(2, worker)
    assert events == others
    return events


def test_a_worker_that_had_no_samples_in_one_interval_is_judged_by_the_next():
    events = step_by_hand(lambda rank, number: (0.5, 0) if rank and number <= 3 else (1.0 + 2 * rank, 10), range(1, 10))
    assert events == [(9, SlowWorker), (9, SharesChanged)]


def test_a_run_that_goes_on_within_an_interval_does_not_judge_by_what_is_left_of_it():
    events = step_by_hand(lambda rank, number: (1.0 + 2 * rank, 10), range(5, 30), interval=6)
    assert {number for number, _ in events} == {24}, "told after 12 and 18; what was told last is heard after 24"


def test_standing_still_inside_forward_is_no_computing():
    def worker(group):
        clock = Stopped()
        loader = Loader(Data(1000), 20, group=group)
        load_balancer = LoadBalancer(loader, group, interval=3, is_following=True, clock=clock)
        waited_s = (0.0, 3.0)[group.rank]
        events = []
        for number in range(1, 20):
            with load_balancer.computing(10):
                clock.now_s += 1.0 + waited_s
            landed = BucketTimes(0, ["a"], 4, 4, 0.0, 0.0, 0.0, landed_s=1.0, waited_s=waited_s)
            later = BucketTimes(1, ["b"], 4, 4, 0.0, 0.0, 0.0, landed_s=9.0, waited_s=0.9)
            events += load_balancer.end_step(number, StepTimes(backward_ended_s=5.0, buckets=[landed, later]))
        return events

    assert LocalGroup.run(2, worker) == [[], []]


def run_scripted(directory, num_workers=4, *, sample_s, script=(), **changes):
    """Train on workers whose clocks only their scripted sleep moves, and return the log."""
    settings = {
        "model": Plain(),
        "data": Points(num_samples=500),
        "optimizer": SGD(learning_rate=0.05),
        "loss": Scripted(objective=Classification(), sample_s=sample_s, faults=script),
        "global_batch": 40,
        "num_steps": 26,
        "evaluate_interval": 0,
        "checkpoint_interval": 0,
        "speed_interval": 3,
        "shares": "measured",
    }
    scripted = ScriptedTime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow, "time", scripted)
        patch.setattr(faults, "time", scripted)
        patch.setattr(session, "LoadBalancer", functools.partial(LoadBalancer, clock=scripted.perf_counter))
        train_here(make_run(**(settings | changes)), directory, num_workers)
    return read_log(directory / "events.jsonl")


def test_measured_shares_are_those_of_the_speeds_and_learn_the_same(tmp_path):
    """Three workers of speed 1 and one of 1/3 take 30 ms a step with even shares, and 12 ms with their own."""
    run_scripted(tmp_path / "even", sample_s=(0.0,), shares=None)
    even = losses_of(tmp_path / "even")
    records = run_scripted(tmp_path / "measured", sample_s=(0.001, 0.001, 0.003, 0.001))
    (change,) = select(records, SharesChanged)
    assert change.event.shares == [12, 12, 4, 12]
    assert change.event.samples_per_s == pytest.approx([1000, 1000, 1000 / 3, 1000])
    assert [(one.event.slow_rank, one.event.factor) for one in select(records, SlowWorker)] == [(2, pytest.approx(3))]
    assert list(losses_of(tmp_path / "measured").values()) == pytest.approx(list(even.values()), abs=1e-5)  # the order
    assert even[26] < even[1]


def test_workers_that_step_alone_follow_speed_too(tmp_path):
    """Where they meet at every step, what they learn is what they learn together."""
    settings = {"num_workers": 2, "num_steps": 18, "global_batch": 12, "clip_norm": None}
    settings["optimizer"] = SGD(learning_rate=0.05, momentum=0.0)
    records = run_scripted(tmp_path / "alone", sample_s=(0.002, 0.01), sync=LocalSGD(period=1), **settings)
    assert [change.event.shares for change in select(records, SharesChanged)] == [[10, 2]]
    run_scripted(tmp_path / "even", sample_s=(0.0,), shares=None, **settings)
    even, alone = losses_of(tmp_path / "even"), losses_of(tmp_path / "alone")
    assert list(alone.values()) == pytest.approx(list(even.values()), abs=1e-5)


@pytest.mark.parametrize("sync", ["local_sgd", "dpsgd"])
def test_workers_that_seldom_synchronise_come_to_the_same_shares(sync, tmp_path):
    settings = {"num_workers": 2, "num_steps": 18, "global_batch": 12, "checkpoint_interval": 7}
    records = run_scripted(tmp_path, sample_s=(0.002, 0.01), sync=sync, **settings)
    assert [change.event.shares for change in select(records, SharesChanged)] == [[10, 2]]
    assert [one.event.slow_rank for one in select(records, SlowWorker)] == [1]
    assert len(losses_of(tmp_path)) == 18


def test_a_transient_slow_step_triggers_nothing(tmp_path):
    """Were the slow steps what counts, rank 1 would be 5 times slower than the other."""
    script = tuple(faults.delay(rank=1, step=step, duration_s=0.2) for step in (1, 4, 7, 10))
    records = run_scripted(tmp_path, 2, sample_s=(0.005,), script=script, num_steps=15, global_batch=20)
    assert select(records, SlowWorker) == []
    assert select(records, SharesChanged) == []


def test_a_resumed_run_goes_on_with_its_shares(tmp_path):
    """The checkpoint is of when the new shares are known, but not in force yet; the resumed run measures nothing."""

    def saved_shares(step):
        (checkpoint,) = tmp_path.glob(f"checkpoints/step-{step:08}*/state.json")
        return json.loads(checkpoint.read_text())["loader"]["shares"]

    settings = {"sample_s": (0.001, 0.009), "num_steps": 20, "global_batch": 20, "checkpoint_interval": 10}
    script = (faults.fail(rank=0, step=15, message="the power is off"),)
    with pytest.raises((faults.ScriptedError, CommunicationError), match="the power is off"):
        run_scripted(tmp_path, 2, script=script, **settings)
    (first, *_) = select(read_log(tmp_path / "events.jsonl"), SharesChanged)
    assert first.step == 9
    new = [first.event.start, list(map(float, first.event.shares))]
    assert saved_shares(10) == [[0, [1.0, 1.0]], new]
    run_scripted(tmp_path, 2, speed_interval=1000, **settings)
    assert saved_shares(20) == [new]


def test_another_number_of_workers_begins_with_even_shares():
    state = Loader(Data(100), 12, group=LocalGroup.create(2)[0], shares=[3, 1]).state_dict()
    three, two = (Loader(Data(100), 12, group=LocalGroup.create(number)[0]) for number in (3, 2))
    assert not three.load_shares(state)
    assert three.shares == [4, 4, 4]
    assert two.load_shares(state)
    assert two.shares == [9, 3]
    assert not two.load_shares({key: value for key, value in state.items() if key != "shares"})


def test_shares_cannot_follow_where_workers_take_what_they_have_time_for():
    @register("test_asynchronous")
    class Asynchronous(EveryStep):
        @property
        def is_asynchronous(self):
            return True

    with pytest.raises(ValidationError, match="shares must be weights or none with sync test_asynchronous"):
        make_run(shares="measured", sync=Asynchronous())
    assert make_run(shares=(1.0, 2.0), sync=Asynchronous()).fixed_shares == (1.0, 2.0)
    assert make_run(shares="measured").fixed_shares is None
