import contextlib
import multiprocessing
import os
import signal
import time

import pytest

from paceline.launch.signals import StopRequest, drop_lost_output, leaving_when_asked


def test_signals_are_noted_and_handed_on_and_then_as_before():
    before = signal.getsignal(signal.SIGTERM)
    told = []
    with StopRequest() as stop:
        stop.hand_on = told.append
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
    assert stop.number == signal.SIGTERM
    assert told == [signal.SIGTERM, signal.SIGHUP]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_hangup_that_was_ignored_stays_ignored():
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.number
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, signal.SIGKILL), (signal.SIGTERM, signal.SIGTERM)])
def test_ctrl_c_long_after_the_first_ends_workers_at_once(monkeypatch, number, expected):
    told = []
    with StopRequest() as stop:
        stop.hand_on = told.append
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # `timeout` signals its child, and then the group with it
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + 10)
        os.kill(os.getpid(), number)
    assert told == [number, number, expected]


def be_asked_to_stop_in_an_import():
    with leaving_when_asked(75):
        with contextlib.suppress(BaseException):  # as modules do that look for others
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)


def test_before_workers_are_started_a_signal_leaves_with_the_code():
    process = multiprocessing.get_context("fork").Process(target=be_asked_to_stop_in_an_import)
    process.start()
    process.join()
    assert process.exitcode == 75


def print_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    drop_lost_output()
    os.write(1, b"nobody reads this")
    assert os.readlink("/proc/self/fd/2") != os.devnull, "what can be read is left alone"


def test_output_that_nobody_can_read_is_no_error():
    process = multiprocessing.get_context("fork").Process(target=print_without_reader)
    process.start()
    process.join()
    assert process.exitcode == 0
