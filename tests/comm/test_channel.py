import gc
import threading
import time
import weakref
from itertools import pairwise

import pytest

from paceline.comm.channel import Channel
from paceline.errors import CommunicationError

NAME = "test-channel"


@pytest.fixture
def channel():
    channel = Channel(NAME)
    yield channel
    channel.close()
    expect_no_thread()


def expect_no_thread():
    for _ in range(200):
        if NAME not in {thread.name for thread in threading.enumerate()}:
            return
        time.sleep(0.01)
    raise AssertionError("the thread of a channel must end with it")


def test_jobs_run_in_order_in_a_thread_of_their_own(channel):
    threads, numbers = set(), []

    def run(number):
        time.sleep(0.001 * (5 - number))
        threads.add(threading.current_thread().name)
        numbers.append(number)

    works = [channel.submit(lambda number=number: run(number)) for number in range(5)]
    for work in reversed(works):
        work.wait()
    assert numbers == [0, 1, 2, 3, 4]
    assert threads == {NAME}
    for work, after in pairwise(works):
        assert work.began_s <= work.ended_s <= after.began_s


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
    assert freed.wait(5), "it lives on with the work, or in the thread that waits for the next job"


def test_a_closed_channel_ends_what_it_has_and_takes_no_more(channel):
    ran = []
    works = [channel.submit(lambda: (time.sleep(0.01), ran.append(1))[1]) for _ in range(3)]
    channel.close()
    channel.close()
    with pytest.raises(CommunicationError, match=f"channel '{NAME}' must be open, but was closed"):
        channel.submit(lambda: None)
    works[-1].wait()
    assert ran == [1, 1, 1]


def test_the_thread_of_a_forgotten_channel_ends():
    channel = Channel(NAME)
    channel.submit(lambda: None).wait()
    del channel
    gc.collect()
    expect_no_thread()
