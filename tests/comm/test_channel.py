import gc
import threading
import time
import weakref
from itertools import pairwise

import pytest

from paceline.comm.channel import Channel
from paceline.errors import CommunicationError

NAME = "test-channel"


@pytest.fixture(params=[False, True], ids=["own thread", "waiters too"])
def channel(request):
    channel = Channel(NAME, waiters_run=request.param)
    yield channel
    channel.close()
    expect_no_thread()


def expect_no_thread():
    for _ in range(3000):
        if NAME not in {thread.name for thread in threading.enumerate()}:
            return
        time.sleep(0.01)
    raise AssertionError("the thread of a channel must end with it")


def test_jobs_run_in_order(channel):
    numbers = []

    def run(number):
        time.sleep(0.001 * (5 - number))
        numbers.append(number)

    works = [channel.submit(lambda number=number: run(number)) for number in range(5)]
    for work in reversed(works):
        work.wait()
    assert numbers == [0, 1, 2, 3, 4]
    for work, after in pairwise(works):
        assert work.began_s <= work.ended_s <= after.began_s


def test_jobs_run_without_a_waiter(channel):
    threads = []
    job = channel.submit(lambda: threads.append(threading.current_thread().name))
    assert job.ends_within(20)
    job.wait()
    assert threads == [NAME]


@pytest.mark.parametrize("waiters_run", [False, True], ids=["own thread", "waiters too"])
def test_who_waits_runs_jobs_where_that_is_asked_for(waiters_run):
    channel = Channel(NAME, waiters_run=waiters_run)
    threads, numbers = [], []

    def run(number):
        threads.append(threading.current_thread().name)
        numbers.append(number)

    for first in range(0, 600, 3):
        works = [channel.submit(lambda number=number: run(number)) for number in range(first, first + 3)]
        works[1].wait()
        works[2].wait()
    channel.close()
    expect_no_thread()
    assert numbers == list(range(600))
    assert (threading.current_thread().name in threads) is waiters_run
    assert set(threads) <= {NAME, threading.current_thread().name}


def test_a_wait_is_noted_while_it_lasts(channel):
    notes = []
    may_end = threading.Event()

    def note(sequence):
        notes.append(sequence)
        may_end.set()

    channel._on_wait = note
    job = channel.submit(lambda: may_end.wait(20) and notes.append("job"), sequence=7)
    while job.began_s is None:
        time.sleep(0.001)
    job.wait()
    assert notes == [7, "job", 0]
    job.wait()
    assert notes == [7, "job", 0], "who finds it done does not wait"


def test_a_wait_of_limited_time(channel):
    may_end = threading.Event()
    job = channel.submit(lambda: may_end.wait(20))
    assert not job.ends_within(0.01)
    may_end.set()
    assert job.ends_within(20)


def test_submitting_does_not_wait(channel):
    may_end = threading.Event()
    work = channel.submit(lambda: may_end.wait(20) or None)
    second = channel.submit(may_end.clear)
    assert work.ended_s is None
    assert second.began_s is None
    may_end.set()
    second.wait()
    assert not may_end.is_set()


def test_after_a_failure_all_others_fail_with_it(channel):
    ran = []
    good = channel.submit(lambda: ran.append("good"))
    bad = channel.submit(lambda: ran.append(1 / 0))
    after = channel.submit(lambda: ran.append("after"))
    good.wait()
    for work in (bad, after, bad, channel.submit(lambda: ran.append("much later"))):
        with pytest.raises(ZeroDivisionError):
            work.wait()
    assert ran == ["good"]


def test_what_a_job_held_is_let_go(channel):
    class Held:
        pass

    held = Held()
    freed = threading.Event()
    weakref.finalize(held, freed.set)
    work = channel.submit(lambda held=held: None)
    del held
    work.wait()
    gc.collect()
    assert freed.wait(30), "it lives on with the work, or in the thread that waits for the next job"


def test_a_closed_channel_ends_what_it_has_and_takes_no_more(channel):
    ran = []
    works = [channel.submit(lambda: (time.sleep(0.01), ran.append(1))[1]) for _ in range(3)]
    channel.close()
    channel.close()
    with pytest.raises(CommunicationError, match=f"channel '{NAME}' must be open, but was closed"):
        channel.submit(lambda: None)
    works[-1].wait()
    assert ran == [1, 1, 1]


def test_the_last_job_is_run_once(channel):
    ran = []
    channel.submit(lambda: (time.sleep(0.01), ran.append("first"))[1])
    channel.close(lambda: ran.append("last"))
    channel.close(lambda: ran.append("later"))
    expect_no_thread()
    assert ran == ["first", "last"]


def test_the_thread_of_a_forgotten_channel_ends():
    channel = Channel(NAME)
    channel.submit(lambda: None).wait()
    del channel
    gc.collect()
    expect_no_thread()
