import json
import math
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.data import GlobalOrder, Interval, Ledger, Sequential, apportion, derive_seed
from paceline.errors import SettingsError

sizes = st.one_of(st.integers(1, 70), st.integers(1, 5000))
FROZEN_10 = [6, 2, 5, 4, 8, 9, 3, 7, 1, 0]
FROZEN_10_NEXT = [0, 5, 7, 9, 3, 2, 4, 8, 6, 1]
FROZEN_37 = [23, 2, 12, 20, 1, 30, 11, 35]
FROZEN_LARGE = [363237609540, 327189866380, 331888280011, 233444782656]
FROZEN_SEED = 15020427595393229491

seeds = st.integers(-(2**63), 2**64)
weights_of = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=9).filter(lambda w: sum(w) > 0)

always = settings(deadline=None, derandomize=True)


def epoch_of(order, epoch):
    return order.samples_at(Interval(epoch * order.num_samples, (epoch + 1) * order.num_samples))


@always
@given(size=sizes, seed=seeds, epoch=st.integers(0, 2**40))
@example(size=1, seed=0, epoch=0)
@example(size=2**12, seed=0, epoch=0)
@example(size=2**12 + 1, seed=0, epoch=0)
def test_every_epoch_is_a_permutation(size, seed, epoch):
    samples = epoch_of(GlobalOrder(size, seed), epoch)
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(size))


@always
@given(size=st.integers(1, 300), seed=seeds, epoch=st.integers(0, 5), data=st.data())
def test_a_sample_does_not_depend_on_the_interval_it_is_read_in(size, seed, epoch, data):
    order = GlobalOrder(size, seed)
    whole = epoch_of(order, epoch)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    part = order.samples_at(Interval(epoch * size + start, epoch * size + stop))
    assert part.tolist() == whole[start:stop].tolist()


@pytest.mark.parametrize(("size", "stop"), [(1, 1200), (7, 40)])
def test_an_interval_may_span_many_epochs(size, stop):
    order = GlobalOrder(size)
    epochs = [epoch_of(order, epoch).tolist() for epoch in range(stop // size + 1)]
    assert order.samples_at(Interval(3, stop)).tolist() == sum(epochs, [])[3:stop]
    assert order.samples_at(Interval(stop, stop)).tolist() == []


def test_epochs_and_seeds_differ():
    orders = {
        tuple(epoch_of(GlobalOrder(50, seed), epoch)) for seed in (-1, 0, 1, 2, 2**63) for epoch in (0, 1, 2, 2**33)
    }
    assert len(orders) == 20


def test_without_shuffling_every_epoch_has_the_data_sets_own_order():
    order = GlobalOrder(7, seed=3, arrangement=Sequential().arrange([7], 3))
    assert epoch_of(order, 0).tolist() == epoch_of(order, 5).tolist() == list(range(7))


def test_the_order_is_frozen():
    """Another order would make every run that is resumed by a newer version repeat and skip samples."""
    assert epoch_of(GlobalOrder(10, seed=0), 0).tolist() == FROZEN_10
    assert epoch_of(GlobalOrder(10, seed=0), 1).tolist() == FROZEN_10_NEXT
    assert epoch_of(GlobalOrder(37, seed=-5), 3).tolist()[:8] == FROZEN_37
    large = GlobalOrder(10**12, seed=2026).samples_at(Interval(4 * 10**12 + 5, 4 * 10**12 + 9))
    assert large.tolist() == FROZEN_LARGE
    assert derive_seed(1, 2, 3) == FROZEN_SEED


@pytest.mark.parametrize("size", [3, 4, 5, 6, 8, 13])
def test_each_sample_is_as_likely_at_each_place(size):
    num_seeds = 2000
    counts = np.zeros((size, size))
    for seed in range(num_seeds):
        counts[np.arange(size), epoch_of(GlobalOrder(size, seed), 0)] += 1
    assert chi_square_excess(counts, num_seeds / size, (size - 1) ** 2) < 5


def test_all_orders_of_four_samples_are_as_likely():
    num_seeds = 6000
    counts = {}
    for seed in range(num_seeds):
        samples = tuple(epoch_of(GlobalOrder(4, seed), 0))
        counts[samples] = counts.get(samples, 0) + 1
    assert len(counts) == 24
    assert chi_square_excess(np.array(list(counts.values())), num_seeds / 24, 23) < 5


def test_neighbours_in_the_data_are_spread_over_an_epoch():
    size = 4096
    places = np.argsort(epoch_of(GlobalOrder(size, seed=11), 0))
    deciles = np.histogram(np.abs(np.diff(places)), bins=size * (1 - np.sqrt(1 - np.arange(11) / 10)))[0]
    assert chi_square_excess(deciles, (size - 1) / 10, 9) < 5
    correlation = np.corrcoef(np.arange(size), places)[0, 1]
    assert abs(correlation) < 5 / math.sqrt(size)


def chi_square_excess(counts, expected, freedom):
    """Return how many standard deviations the statistic lies above its mean; seeds are fixed, so it never varies."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [0, -1])
def test_an_empty_data_set_is_refused(size):
    with pytest.raises(SettingsError, match=f"num_samples must be at least 1, but got {size}"):
        GlobalOrder(size)


def test_seeds_derived_from_different_numbers_differ():
    derived = [derive_seed(*numbers) for numbers in [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (-1,), (2**63,), (1, 2)]]
    grid = [derive_seed(0, step, rank, part) for step in range(20) for rank in range(10) for part in range(5)]
    assert len({*derived, *grid}) == len(derived) + len(grid)
    assert all(0 <= seed < 2**64 for seed in [*derived, *grid])


@always
@given(num_samples=st.integers(0, 10_000), weights=weights_of)
@example(num_samples=10, weights=[1e-320, 1.0])
@example(num_samples=7, weights=[0.1] * 3)
@example(num_samples=10_000, weights=[1e300, 1e300, 1e-300])
def test_shares_add_up_and_are_within_one_of_exact(num_samples, weights):
    shares = apportion(num_samples, weights)
    assert len(shares) == len(weights)
    assert sum(shares) == num_samples
    total = math.fsum(weights)
    for share, weight in zip(shares, weights, strict=True):
        assert share >= 0
        assert abs(share - num_samples * (weight / total)) < 1 + 1e-6
        assert weight > 0 or share == 0, "no weight, no samples"


@always
@given(num_samples=st.integers(0, 500), weights=st.lists(st.integers(0, 30), min_size=1, max_size=9).filter(any))
def test_what_is_left_over_goes_to_the_largest_remainders(num_samples, weights):
    shares = apportion(num_samples, weights)
    exact = [Fraction(num_samples * weight, sum(weights)) for weight in weights]
    rounded_up = [share - int(share) for share, given in zip(exact, shares, strict=True) if given > share]
    rounded_down = [share - int(share) for share, given in zip(exact, shares, strict=True) if given < share]
    # Shares are computed in float64: two remainders nearer than this may change places.
    assert min(rounded_up, default=1) >= max(rounded_down, default=0) - Fraction(1, 10**9)


@always
@given(num_samples=st.integers(0, 1000), num_workers=st.integers(1, 50))
def test_even_shares_differ_by_one_and_larger_ones_come_first(num_samples, num_workers):
    shares = apportion(num_samples, [1.0] * num_workers)
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@always
@given(num_samples=st.integers(0, 1000), weights=weights_of, scale=st.sampled_from([2.0, 0.25, 1024.0]))
def test_only_the_proportion_of_weights_counts(num_samples, weights, scale):
    weights = [round(weight) + 1.0 for weight in weights]
    assert apportion(num_samples, weights) == apportion(num_samples, [weight * scale for weight in weights])


@always
@given(
    size=st.integers(1, 200),
    seed=st.integers(0, 9),
    phases=st.lists(
        st.tuples(st.integers(1, 60), weights_of, st.integers(1, 12)),  # global batch, shares of workers, steps
        min_size=1,
        max_size=4,
    ),
)
def test_any_resizing_uses_each_sample_once_in_each_epoch(size, seed, phases):
    """Workers come and go at any step, with any shares and batches; what is read is the order and nothing else."""
    order = GlobalOrder(size, seed)
    state = Ledger().state_dict()
    used = []
    for global_batch, weights, num_steps in phases:
        ledger = Ledger.from_state(json.loads(json.dumps(state)))
        for _ in range(num_steps):
            interval = ledger.claim(order, global_batch)
            assert 1 <= interval.num_samples <= global_batch
            assert order.epoch_of(interval.start) == order.epoch_of(interval.stop - 1)
            shares = apportion(interval.num_samples, weights)
            for stop, share in zip(accumulate(shares, initial=interval.start), [0, *shares], strict=True):
                used += order.samples_at(Interval(stop - share, stop)).tolist()
            ledger.ack(interval)
        state = ledger.state_dict()
        ledger.claim(order, global_batch)  # read ahead, and lost with the worker
    assert state == {"low_water": len(used), "done_above": []}, "in step, the ledger is one integer"
    assert (
        used
        == [int(sample) for epoch in range(len(used) // size + 1) for sample in epoch_of(order, epoch)][: len(used)]
    )


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    size=st.integers(1, 30),
    global_batch=st.integers(1, 30),
    num_ahead=st.integers(0, 5),
    stopped_after=st.integers(0, 9),
    done=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=3),
)
@example(size=10, global_batch=4, num_ahead=0, stopped_after=5, done=[(8, 2)])
def test_dropped_ends_of_epochs_are_passed_over_wherever_a_ledger_was_saved(
    size, global_batch, num_ahead, stopped_after, done
):
    """What was used out of turn before stays used; how far is read ahead changes nothing."""
    order = GlobalOrder(size, tail="drop")
    global_batch = min(global_batch, size)
    start = {"low_water": 0, "done_above": []}
    for first, num_samples in sorted(done):
        if first > start["low_water"] and all(first >= stop for _, stop in start["done_above"]):
            start["done_above"].append([first, min(first + num_samples, first // size * size + size)])
    straight, resumed = Ledger.from_state(start), Ledger.from_state(start)
    used = {position for interval in start["done_above"] for position in range(*interval)}
    out = [straight.claim(order, global_batch) for _ in range(num_ahead)]
    for step in range(10):
        out.append(straight.claim(order, global_batch))
        if step == stopped_after:
            resumed = Ledger.from_state(json.loads(json.dumps(resumed.state_dict())))
        interval = out.pop(0)
        assert interval == resumed.claim(order, global_batch)
        assert not used & set(range(*interval))
        used |= set(range(*interval))
        straight.ack(interval)
        resumed.ack(interval)
        assert done or straight.state_dict() == resumed.state_dict() == {"low_water": interval.stop, "done_above": []}
    left_out = set(range(straight.low_water)) - used
    assert all(position % size >= size - global_batch + 1 for position in left_out), "only ends of epochs"


def test_what_was_used_out_of_turn_is_not_claimed_again_once_all_before_it_is_used():
    order, ledger = GlobalOrder(10), Ledger(0, [Interval(1, 4)])
    ledger.ack(ledger.claim(order, 1))
    assert ledger.low_water == 4
    assert ledger.claim(order, 1) == (4, 5)


class LedgerMachine(RuleBasedStateMachine):
    """Claims, acknowledgements in any order, and restarts, beside a model that counts each position."""

    def __init__(self):
        super().__init__()
        self.used = {}
        self.out = []

    @initialize(size=st.integers(1, 30))
    def begin(self, size):
        self.order = GlobalOrder(size)
        self.ledger = Ledger()

    @rule(global_batch=st.integers(1, 12))
    def claim(self, global_batch):
        interval = self.ledger.claim(self.order, global_batch)
        assert 1 <= interval.num_samples <= global_batch
        assert self.order.epoch_of(interval.start) == self.order.epoch_of(interval.stop - 1)
        taken = {position for other in self.out for position in range(*other)}
        assert not any(position in taken or position in self.used for position in range(*interval))
        self.out.append(interval)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def ack(self, data):
        interval = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.ledger.ack(interval)
        for position in range(*interval):
            self.used[position] = self.used.get(position, 0) + 1

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def ack_what_was_used(self, data):
        position = data.draw(st.sampled_from(sorted(self.used)))
        before = self.ledger.state_dict()
        with pytest.raises(SettingsError, match="acknowledge each batch once"):
            self.ledger.ack(Interval(position, position + 1))
        assert self.ledger.state_dict() == before

    @rule(past=st.integers(1, 40))
    def ack_what_was_never_claimed(self, past):
        before = self.ledger.state_dict()
        with pytest.raises(SettingsError, match="must be claimed and not yet used"):
            self.ledger.ack(Interval(self.ledger.next_claim, self.ledger.next_claim + past))
        assert self.ledger.state_dict() == before

    @rule()
    def restart(self):
        """A checkpoint is all that is left; what was out is claimed again."""
        self.ledger = Ledger.from_state(json.loads(json.dumps(self.ledger.state_dict())))
        self.out.clear()

    @invariant()
    def nothing_is_used_twice_or_forgotten(self):
        if not hasattr(self, "ledger"):
            return
        assert set(self.used.values()) <= {1}
        low_water = self.ledger.low_water
        above = {position for done in self.ledger.done_above for position in range(*done)}
        assert set(self.used) == set(range(low_water)) | above
        assert low_water not in self.used, "the low-water mark is as high as it can be"

    def teardown(self):
        """Whatever happened, claiming on fills every hole before it goes on."""
        if hasattr(self, "ledger"):
            self.restart()
            last = max(self.used, default=0)
            while self.ledger.low_water <= last:
                self.claim(5)
                for interval in self.out:
                    self.ledger.ack(interval)
                    self.used |= dict.fromkeys(range(*interval), 1)
                self.out.clear()
            self.nothing_is_used_twice_or_forgotten()
            assert set(self.used) == set(range(self.ledger.low_water))


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestLedger = LedgerMachine.TestCase
