import signal

import pytest

from paceline.comm import membership
from paceline.comm.membership import Membership


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_interrupt_beside_another_signal_is_the_same_request(first):
    """A terminal and a launcher may both send it, at once."""
    joined = Membership()
    with joined.stopping_on_signals():
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGINT)
    assert joined.stop_requested_by == first.name


def test_a_second_interrupt_later_ends_at_once(monkeypatch):
    joined, now = Membership(), [0.0]
    monkeypatch.setattr(membership.time, "monotonic", lambda: now[0])
    with joined.stopping_on_signals():
        signal.raise_signal(signal.SIGINT)
        now[0] = 3.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with joined.stopping_on_signals(may_interrupt=False):
        for now[0] in (10.0, 20.0):
            signal.raise_signal(signal.SIGINT)


def test_sigterm_may_be_a_request_to_leave_alone(monkeypatch):
    joined, asked = Membership(), []
    monkeypatch.setattr(membership, "_on_sigterm", [])
    membership.leave_on_sigterm(lambda: asked.append("leave"))
    with joined.stopping_on_signals():
        signal.raise_signal(signal.SIGTERM)
        assert (asked, joined.stop_requested_by) == (["leave"], "")
        signal.raise_signal(signal.SIGINT)
    assert joined.stop_requested_by == "SIGINT"
