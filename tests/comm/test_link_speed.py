"""The speed of the network, measured on the exchanges of training."""

import math

import pytest
import torch

from paceline.comm import LocalGroup, join
from paceline.comm.link_speed import LinkMeter, LinkSpeed, TimedExchange, fit_speed
from paceline.testing.processes import run_processes


def measure(spans_of):
    """Return the speed that each rank finds from steps of `spans_of[rank]`: bytes, begin and end."""

    def worker(group):
        meter = LinkMeter(group, num_steps=5)
        for step in spans_of[group.rank]:
            meter.note_step(TimedExchange(*span) for span in step)
        return meter.agree()

    return LocalGroup.run(len(spans_of), worker, timeout_s=20)


def test_latency_and_bandwidth_come_from_exchanges_of_several_sizes():
    link = LinkSpeed(0.002, 1e6)
    spans = [[(size, 0.0, link.exchange_s(size))] for size in (40, 1000, 100_000)]
    for found in measure([spans, spans]):
        assert found.latency_s == pytest.approx(0.002)
        assert found.bytes_per_s == pytest.approx(1e6)


def test_an_exchange_takes_as_long_as_it_took_the_worker_that_came_last():
    early, late = [[(100, 0.0, 5.0)]], [[(100, 7.0, 8.0)]]  # clocks differ too
    assert measure([early, late]) == [LinkSpeed(0.0, 100.0)] * 2


def test_exchanges_that_share_the_network_are_not_counted_twice():
    """Two exchanges at a time, each at half the speed: together 400 bytes in 4 seconds."""
    both = [[(200, 0.0, 4.0), (200, 0.0, 4.0)]]
    assert measure([both, both]) == [LinkSpeed(0.0, 100.0)] * 2


def test_one_slow_step_of_many_changes_nothing():
    steps = [[(100, 0.0, 1.0)]] * 4 + [[(100, 0.0, 60.0)]]
    assert measure([steps, steps]) == [LinkSpeed(0.0, 100.0)] * 2


def test_only_the_last_steps_count():
    steps = [[(100, 0.0, 60.0)]] * 5 + [[(100, 0.0, 1.0)]] * 5
    assert measure([steps, steps]) == [LinkSpeed(0.0, 100.0)] * 2


def test_exchanges_of_one_size_are_taken_to_have_no_latency():
    assert fit_speed([(100, 4.0)]) == LinkSpeed(0.0, 25.0)


def test_exchanges_that_take_no_longer_for_more_bytes_are_all_latency():
    assert fit_speed([(100, 3.0), (200, 2.0)]) == LinkSpeed(2.5, math.inf)
    assert fit_speed([(0, 0.5)]) == LinkSpeed(0.5, math.inf)


def test_without_exchanges_there_is_no_speed():
    assert measure([[], []]) == [None, None]
    assert fit_speed([(100, 0.0)]) is None


def time_collective():
    with join(timeout_s=20, device="cpu", transport="network") as group:
        work = group.all_reduce(torch.zeros(2**20), name="timed")
        work.wait()
        group.barrier()  # the time is noted in gloo's own thread
        return work.ended_s - work.began_s


def test_a_collective_over_the_network_knows_when_it_began_and_ended():
    assert all(result.value > 0 for result in run_processes(2, time_collective))
