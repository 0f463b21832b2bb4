import threading
import time
import warnings

import pytest
import torch

from paceline.comm import join, pacing
from paceline.comm.pacing import HEADERS, TokenBucket, find_limit, limit_bandwidth
from paceline.replica import Replica
from paceline.sync import Rule
from paceline.testing import run_processes
from paceline.testing.netlab import Netlab, netlab_missing, read_counters


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self):
        self.now = 100.0

    def sleep(self, seconds):
        self.now += seconds


def test_messages_leave_at_the_mean_speed_and_pauses_earn_nothing():
    clock = Clock()
    bucket = TokenBucket(1000, clock=lambda: clock.now, sleep=clock.sleep)
    left = []
    for _ in range(4):
        bucket.take(500)
        left.append(clock.now - 100)
    assert left == pytest.approx([0.5 * HEADERS * number for number in range(4)])
    clock.sleep(60)
    began = clock.now
    for _ in range(3):
        bucket.take(500)
    assert clock.now - began == pytest.approx(2 * 0.5 * HEADERS), "no burst after an hour of silence"


def test_of_several_limits_the_least_counts_while_its_holder_lives():
    class Holder:
        pass

    first, second = Holder(), Holder()
    assert find_limit() is None
    limit_bandwidth(first, 1000)
    limit_bandwidth(second, 500)
    bucket = find_limit()
    assert bucket.bytes_per_s == 500
    assert find_limit() is bucket, "what has been sent is remembered"
    limit_bandwidth(second, None)
    assert find_limit().bytes_per_s == 1000
    del first
    assert find_limit() is None


def collect():
    """Return what each collective gives under a limit, and the bytes that were paid for."""
    paid = []

    class Counting(TokenBucket):
        def take(self, num_bytes):
            paid.append((threading.current_thread().name, num_bytes))

    holder = threading.Event()
    pacing.TokenBucket = Counting
    with join(transport="network") as group:
        limit_bandwidth(holder, 1e9)
        rank, size = group.rank, group.size
        large = torch.arange(700_000, dtype=torch.float32).view(700, 1000) + rank
        group.all_reduce(large, name="sum").wait()
        summed = sum(num_bytes for _, num_bytes in paid)
        slices = len(paid)
        copied = torch.full((5,), float(rank))
        group.broadcast(copied, source=1, name="copy").wait()
        rows = torch.zeros(size, 3)
        group.all_gather(rows, torch.full((3,), float(rank)), name="gather").wait()
        swapped = torch.zeros(size, 2)
        group.all_to_all(swapped, torch.full((size, 2), float(rank)), name="swap").wait()
        before = len(paid)
        message = torch.full((4,), float(rank))
        works = [group.send(message, (rank + 1) % size, tag=3, name="hop")]
        received = torch.zeros(4)
        works.append(group.receive(received, (rank - 1) % size, tag=3, name="hop"))
        for work in works:
            work.wait()
        hop = paid[before:]
        right = torch.equal(large, size * torch.arange(700_000, dtype=torch.float32).view(700, 1000) + sum(range(size)))
        return (
            right,
            slices,
            summed / (4 * 700_000),
            copied.tolist(),
            rows[:, 0].tolist(),
            swapped[:, 0].tolist(),
            received.tolist(),
            [num_bytes for _, num_bytes in hop],
        )


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_under_a_limit_are_the_same_in_slices_and_every_byte_is_paid_for(size):
    everybody = run_processes(size, collect)
    for rank, (right, slices, share, copied, rows, swapped, received, hop) in enumerate(
        result.value for result in everybody
    ):
        assert right
        assert share == pytest.approx(2 * (size - 1) / size)
        assert slices == -(-2 * (size - 1) * 4 * 700_000 // size // 2**20)
        assert (copied, rows, swapped) == ([1.0] * 5, [float(r) for r in range(size)], [float(r) for r in range(size)])
        assert received == [float((rank - 1) % size)] * 4
        assert hop == [16]


def limit_on_one_host():
    with join() as group, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = torch.nn.Linear(2, 2)
        rule = Rule.model_validate({"name": "every_step", "max_bandwidth": "32mbit"})
        Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, sync=rule).close()
    return [str(warning.message) for warning in caught if "max_bandwidth" in str(warning.message)]


def test_a_limit_between_workers_of_one_host_warns_once_that_it_limits_nothing():
    first, second = (result.value for result in run_processes(2, limit_on_one_host))
    assert len(first) == 1
    assert "limits nothing" in first[0]
    assert second == []


LIMIT = 32e6 / 8
"""32 Mbit/s, on links of 1 Gbit/s."""


def train_under_a_limit():
    """Return the bytes that one step sends, and bytes and seconds at the interface over some steps, for each rule."""
    found = {}
    with join() as group:
        for sync in ("every_step", "dpsgd", "local_sgd"):
            module = torch.nn.Linear(700, 700)
            rule = Rule.model_validate({"name": sync, "max_bandwidth": "32mbit"} | EXTRA.get(sync, {}))
            replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, sync=rule)
            for step in range(5):
                if step == 1:
                    began_s, before = time.monotonic(), read_counters().sent_bytes
                replica.backward(replica(torch.ones(1, 700)).sum(), weight=1.0)
                replica.update()
            replica.flush()
            found[sync] = read_counters().sent_bytes - before, time.monotonic() - began_s
            replica.close()
            assert find_limit() is None
    return found


EXTRA = {"local_sgd": {"period": 1}}


@pytest.mark.slow
@pytest.mark.skipif(bool(netlab_missing()), reason=netlab_missing() or "a netlab can be made")
def test_a_training_keeps_below_its_limit_at_the_interface():
    with Netlab(num_hosts=3, bandwidth_bits_per_s=1e9) as lab:
        results = lab.run(train_under_a_limit, timeout_s=150)
    for result in results:
        assert result.exit_code == 0, result.output
        for sync, (sent, seconds) in result.value.items():
            model = 4 * (700 * 700 + 700)
            assert sent > 3 * model, (sync, "it has trained over the network")
            # What leaves at once before it is paid for: a slice for each of the streams.
            assert sent <= 1.05 * LIMIT * seconds + 2 * 2**20, (sync, sent / seconds / LIMIT)
