"""Operations on a GPU that hang are aborted, and the missing rank is named; here on operations that are none."""

import gc
import threading
import weakref

import pytest
import torch

from paceline.comm.group import Group
from paceline.comm.torch_group import TorchGroup
from paceline.comm.watchdog import Watchdog
from paceline.errors import PeerTimeoutError


class Operation:
    """An operation that ends when it is told to."""

    def __init__(self):
        self.is_over = False

    def is_completed(self):
        return self.is_over

    def wait(self):
        pass


class Bench:
    """A watchdog with a clock that stands still, whose thread does nothing."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(Watchdog, "wait_for_work", lambda _: False)
        self.now_s, self.aborted = 0.0, 0
        self.watchdog = Watchdog(10.0, lambda sequence: f"rank 3 is not in {sequence}", self.abort, lambda: self.now_s)

    def abort(self):
        assert self.watchdog.failure is not None  # or who goes on after the abort would not know of it
        self.aborted += 1

    def watch(self, sequence):
        operation = Operation()
        self.watchdog.watch(operation, f"operation {sequence} 'sum' on rank 0", sequence)
        return operation

    def look_at(self, now_s):
        self.now_s = now_s
        self.watchdog.look()


def test_a_hung_operation_is_aborted_once_and_names_the_missing_rank(monkeypatch):
    bench = Bench(monkeypatch)
    bench.watch(1)
    bench.look_at(9.0)
    bench.watchdog.check()
    bench.look_at(10.0)
    bench.look_at(30.0)
    assert bench.aborted == 1
    with pytest.raises(PeerTimeoutError, match=r"operation 1 'sum' on rank 0 must finish within 10 s.*rank 3 is not"):
        bench.watchdog.check()


def test_the_time_of_an_operation_begins_when_the_one_before_has_ended(monkeypatch):
    bench = Bench(monkeypatch)
    first, second = bench.watch(1), bench.watch(2)
    first.is_over = True
    bench.look_at(9.0)
    bench.look_at(18.0)
    assert bench.aborted == 0
    second.is_over = True
    bench.look_at(40.0)  # it has been late, and has ended
    bench.watch(3)
    bench.look_at(49.0)
    assert bench.aborted == 0
    bench.look_at(50.0)
    assert bench.aborted == 1


def test_a_group_on_a_gpu_watches_its_operations_and_raises_what_it_found(monkeypatch):
    bench = Bench(monkeypatch)
    group = TorchGroup.__new__(TorchGroup)  # its constructor needs NCCL
    Group.__init__(group, 0, 2, torch.device("meta"))
    group._board = type("Board", (), {"begin": lambda *_: None, "wait_in": lambda *_: None})()
    group._watchdog, group._sequence = bench.watchdog, 0
    hung = Operation()
    group._backend = type("Backend", (), {"allreduce": lambda *_: hung})()
    work = group.all_reduce(torch.zeros(1, device="meta"), name="sum")
    work.wait()
    work.check()
    bench.look_at(10.0)
    for later in (work.wait, work.check, lambda: group.all_reduce(torch.zeros(1, device="meta"), name="sum").wait()):
        with pytest.raises(PeerTimeoutError, match="operation 1 'sum' on rank 0"):
            later()


def test_the_thread_looks_and_ends_with_the_watchdog():
    aborted = threading.Event()
    watchdog = Watchdog(0.0, lambda _: "", aborted.set)
    watchdog.watch(Operation(), "operation 1", 1)
    assert aborted.wait(30)
    thread, reference = watchdog._thread, weakref.ref(watchdog)
    del watchdog
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    assert reference() is None
