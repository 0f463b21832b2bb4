import threading

import pytest
import torch

from paceline.comm import join, pacing
from paceline.comm.pacing import HEADERS, TokenBucket, find_limit, limit_bandwidth
from paceline.testing import run_processes


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
    for rank, (right, slices, share, copied, rows, swapped, received, hop) in enumerate(result.value for result in everybody):
        assert right
        assert share == pytest.approx(2 * (size - 1) / size)
        assert slices == -(-2 * (size - 1) * 4 * 700_000 // size // 2**20)
        assert (copied, rows, swapped) == ([1.0] * 5, [float(r) for r in range(size)], [float(r) for r in range(size)])
        assert received == [float((rank - 1) % size)] * 4
        assert hop == [16]
