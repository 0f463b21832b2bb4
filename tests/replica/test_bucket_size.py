"""Bucket sizes chosen by the link, alike on all workers."""

import itertools

import pytest
import torch

from paceline.comm import LocalGroup
from paceline.comm.link_speed import LinkSpeed
from paceline.replica import bucket_size, gradients
from paceline.replica.bucket_size import FIRST_SIZE, BackwardPass, BucketSizer, choose_bucket_bytes
from paceline.replica.buckets import plan_layout
from paceline.replica.gradients import Gradients
from paceline.replica.step_result import BucketChoice, BucketTimes, StepTimes
from paceline.sync import EveryStep
from training_models import make_module, make_replica, run_one_step

MIB = 2**20
MANY = {f"{number}": torch.nn.Parameter(torch.empty(MIB // 4)) for number in range(64)}


def plan(size):
    return plan_layout(MANY, list(MANY), size)


def backward_of(seconds):
    """Return a backward pass of 64 MiB that makes gradients evenly for some seconds."""
    return BackwardPass(dict.fromkeys(MANY, float(MIB)), {name: seconds * int(name) / 63 for name in MANY})


def test_the_time_of_the_last_sum_is_that_of_buckets_one_after_another():
    backward = BackwardPass({"a": 10.0, "b": 20.0, "c": 5.0}, {"a": 0.0, "b": 1.0, "c": 9.0}, launch_s=0.5)
    link = LinkSpeed(1.0, 10.0)
    # a: 0.5 to 2.5; b waits for it: to 5.5; c is ready at 9 and has been launched as the third at 10.5.
    assert backward.exchanged_s([["a"], ["b"], ["c"]], link) == 12.0
    assert backward.exchanged_s([["a", "b", "c"]], link) == 9.5 + 4.5


@pytest.mark.parametrize(
    ("backward_s", "latency_s", "mib_per_s", "chosen_mib"),
    [
        (
            1.0,
            0.0,
            70,
            1,
        ),  # backward and the wire take as long: what is left of the last bucket is all that is waited for
        (0.0, 0.05, 100, 64),  # nothing to overlap with: each bucket only costs its latency
        (1.0, 0.1, 1000, 8),  # more buckets would cost more latency than there is to hide
        (1.0, 0.0, 1e6, 4),  # all is hidden: the first size stands
        (0.1, 0.0, 1, 4),  # the wire is busy from the first bucket on, whatever their size
    ],
)
def test_the_size_follows_the_link_and_backward(backward_s, latency_s, mib_per_s, chosen_mib):
    choice = choose_bucket_bytes(backward_of(backward_s), LinkSpeed(latency_s, mib_per_s * MIB), plan)
    assert choice.bucket_bytes == chosen_mib * MIB
    assert f"buckets of {chosen_mib} MiB" in choice.reason


def times_of(layout, seconds_of, now_s=100.0):
    """Return times of buckets that follow each other, each as long as `seconds_of` its bytes."""
    times = []
    for index, names in enumerate(layout):
        num_bytes = MIB * len(names)
        times.append(
            BucketTimes(index, names, num_bytes, num_bytes, 0.0, now_s, now_s + seconds_of(num_bytes), 0.0, 0.0)
        )
        now_s = times[-1].ended_s
    return times


def test_all_workers_choose_by_the_slowest_backward_and_the_exchanges_of_the_last_to_come():
    def worker(group):
        sizer = BucketSizer(group, dict.fromkeys(MANY, float(MIB)))
        layout = plan(FIRST_SIZE)
        seconds = 1.0 if group.rank else 0.0  # only rank 1 has a backward worth hiding behind
        ready_s = {name: 7.0 + seconds * int(name) / 63 for name in MANY}
        is_measured = False
        while not is_measured:
            # Rank 0 waits a second longer for each.
            link = LinkSpeed(0.1 + (1 - group.rank), 1000.0 * MIB)
            is_measured = sizer.measure(times_of(layout, link.exchange_s), ready_s, [0.0, 0.0, 60.0])
        return sizer.agree(plan)

    expected = choose_bucket_bytes(backward_of(1.0), LinkSpeed(0.1, 1000.0 * MIB), plan)
    for choice in LocalGroup.run(2, worker):
        assert choice.bucket_bytes == expected.bucket_bytes == 8 * MIB


def test_a_model_that_fits_the_first_bucket_is_not_measured_and_a_fixed_size_is_kept():
    def worker(group):
        small = {"weight": torch.nn.Parameter(torch.empty(1000))}
        made = [Gradients(parameters, group, EveryStep().start_reducer(group), size) for parameters, size in
                ((small, None), (MANY, 8 * MIB), (MANY, None))]  # fmt: skip
        for each in made:
            each.adapt_layout(StepTimes())
        return [each.is_learning() for each in made]

    assert LocalGroup.run(2, worker) == [[False, False, True]] * 2


@pytest.fixture
def changing_sizes(monkeypatch):
    """Sizes for the small model of the tests; what is chosen differs from one choice to the next."""
    for module in (bucket_size, gradients):
        monkeypatch.setattr(module, "FIRST_SIZE", 400)
        monkeypatch.setattr(module, "SIZES", (100, 10_000))
    chosen = [itertools.cycle([100, 10_000]) for _ in range(2)]

    def agree(sizer, plan):
        return None if sizer.keeps else BucketChoice(next(chosen[sizer._group.rank]), "because")

    monkeypatch.setattr(bucket_size.BucketSizer, "agree", agree)


def layouts(replica, num_steps):
    found, choices = [], []
    for _ in range(num_steps):
        result = run_one_step(replica)
        found.append(replica._reduction.gradients.layout)
        choices.append(result.times.bucket_choice)
    return found, choices


def test_the_layout_changes_once_at_an_agreed_step_and_the_choice_is_told(monkeypatch):
    for module in (bucket_size, gradients):
        monkeypatch.setattr(module, "FIRST_SIZE", 400)
        monkeypatch.setattr(module, "SIZES", (10_000, 100))
    # Whatever is measured, one bucket is best where an exchange costs a second.
    monkeypatch.setattr(bucket_size.LinkMeter, "agree", lambda self: LinkSpeed(1.0, 1e9))

    def worker(group):
        replica = make_replica(make_module(), group, hash_interval=1)
        found, choices = layouts(replica, 8)
        return [len(layout) for layout in found], choices

    for sizes, choices in LocalGroup.run(2, worker):
        assert sizes[-1] == 1 < sizes[0]
        assert [size for size, _ in itertools.groupby(sizes)] == [sizes[0], 1]
        (choice,) = [one for one in choices if one is not None]
        assert choice.bucket_bytes == 10_000
        assert choices.index(choice) == sizes.index(1)
        assert "ms after the first gradient" in choice.reason


@pytest.mark.parametrize("saved_after", range(8))
def test_a_resumed_run_has_the_layouts_of_the_uninterrupted_one(saved_after, changing_sizes):
    """Also if it was saved before the choice, though it would choose otherwise."""

    def worker(group):
        replica = make_replica(make_module(), group)
        layouts(replica, saved_after)
        saved = replica.state.document()
        expected = layouts(replica, 8)[0]
        resumed = make_replica(make_module(), group)
        resumed.state.load_document(saved)
        return expected, layouts(resumed, 8)[0]

    for expected, resumed in LocalGroup.run(2, worker):
        assert resumed == expected


def test_one_worker_whose_state_was_read_keeps_the_size_of_all():
    def worker(group):
        sizer = BucketSizer(group, dict.fromkeys(MANY, float(MIB)))
        sizer.keeps = group.rank == 1
        for _ in range(4):
            sizer.measure(times_of(plan(FIRST_SIZE), lambda num_bytes: num_bytes / MIB), {}, [0.0])
        return sizer.agree(plan)

    assert LocalGroup.run(2, worker) == [None, None]


def test_what_is_learnt_of_a_step_does_not_grow_from_step_to_step():
    def worker(group):
        replica = make_replica(make_module(), group)
        for _ in range(5):
            run_one_step(replica)
        return len(replica._reduction.gradients._launcher.ready_s)

    assert LocalGroup.run(2, worker) == [len([p for p in make_module().parameters() if p.requires_grad])] * 2


def test_exchanges_that_take_as_long_whatever_their_size_change_nothing():
    def worker(group):
        sizer = BucketSizer(group, dict.fromkeys(MANY, float(MIB)))
        for _ in range(4):
            sizer.measure(times_of(plan(FIRST_SIZE), lambda num_bytes: 1.0 / num_bytes), {}, [0.0])
        return sizer.agree(plan)

    assert LocalGroup.run(2, worker) == [None, None]
