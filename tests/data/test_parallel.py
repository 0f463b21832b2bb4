import os
import signal
import threading
import time

import pytest

from paceline.data.formats.parallel import map_in_processes
from paceline.errors import DataError


@pytest.fixture(autouse=True)
def without_threads_of_other_tests(monkeypatch):
    """Threads that tests before have left behind in this process do not count, or the work would be done in it."""
    others = threading.active_count() - 1
    count = threading.active_count
    monkeypatch.setattr(threading, "active_count", lambda: count() - others)


def test_processes_end_where_a_handler_of_sigterm_does_nothing():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert list(map_in_processes(lambda task: task * 2, range(20), 3)) == list(range(0, 40, 2))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_of_this_process_is_not_that_of_the_others():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        pids = set(map_in_processes(lambda _: (time.sleep(0.05), os.getpid())[1], range(6), 2))
        handlers = set(map_in_processes(lambda _: signal.getsignal(signal.SIGTERM), range(2), 2))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert os.getpid() not in pids
    assert handlers == {signal.SIG_DFL}


def test_a_killed_process_is_an_error_that_says_so():
    with pytest.raises(DataError, match="one was killed, perhaps for want of memory; use fewer"):
        list(map_in_processes(lambda _: os.kill(os.getpid(), signal.SIGKILL), range(4), 2))


def test_errors_of_the_work_are_raised_here():
    def work(task):
        if task == 3:
            raise DataError("sample 3 must be whole, but was cut")
        return task

    with pytest.raises(DataError, match="sample 3 must be whole"):
        list(map_in_processes(work, range(8), 2))
