"""Machines that are dropped since others cannot connect to them."""

import time

import pytest
from supervised_threads import supervise

from paceline.elastic.facts import HostLost, Offered
from paceline.elastic.protocol import MembershipSettings
from paceline.elastic.unreachable import find_unreachable


@pytest.mark.parametrize(
    ("pairs", "known", "dropped"),
    [
        ([("w0", "w0@new"), ("w1", "w0@new")], {""}, ["new"]),
        ([("w0@new", "w0")], set(), ["new"]),
        ([("w0@old", "w0@new")], {"", "old"}, ["new"]),
        ([("w0@old", "w1@new"), ("w0", "w0@newer")], {"", "old"}, ["newer", "new"]),
        ([("w0@a", "w0@b"), ("w0@b", "w0@c")], {""}, ["b"]),
        ([("w0@old", "w0@older"), ("w0", "w0@new")], {"", "old", "older"}, ["new"]),
        ([("w0@old", "w0@older")], {"", "old", "older"}, []),
        ([("w0@old", "w0@older")], set(), ["older"]),
        ([("w0@new", "w1@new"), ("w0", "w1")], {""}, []),
    ],
)
def test_machines_that_have_never_trained_with_the_others_are_dropped(pairs, known, dropped):
    assert find_unreachable(pairs, known) == dropped


def supervise_far(tmp_path, script):
    """Run w0, whom w0@far joins; return what people are told, and the machines that are dropped."""
    told, dropped = [], []

    def drop_host(host, reason):
        dropped.append((host, reason))
        return [HostLost(host, reason)]

    def take(supervisor):
        supervisor._workforce.drop_host = drop_host

    requests = [(0, Offered("far", 1))]
    supervise(tmp_path, MembershipSettings(1), script, requests=requests, tell=take, tell_standstill=told.append)
    return told, dropped


REASON = "w0@far could not connect to w0 at 10.0.0.1:7 within 20 s (timed out)"


def lose_far(member, view):
    member._unreachable = (("w0@far", "w0"),)
    member.report_loss(view.step, is_whole=True, reason=REASON)


def train_on(member, view):
    while not member.change_is_pending():
        time.sleep(0.01)
    member.at_boundary(max(view.step, 0) + 5)


def test_a_machine_that_joins_and_cannot_be_reached_is_dropped_and_the_others_go_on(tmp_path):
    names = {}

    def script(member):
        while True:
            view = member.next_view(20)
            names[view.epoch] = view.names
            if "w0@far" in view.names:
                lose_far(member, view)
            elif view.epoch > 0:
                return "done"
            else:
                train_on(member, view)

    told, dropped = supervise_far(tmp_path, script)
    words = f"far is dropped: {REASON}; let connections to all ports through, then start its agent again"
    assert told == [words], "once, though both have told of it"
    assert dropped == [("far", words)]
    assert [*names.values()] == [("w0",), ("w0", "w0@far"), ("w0",)]


def lose_link(member, view):
    member.report_loss(view.step + 1, is_whole=True, reason="the link was cut")


def test_two_that_have_trained_together_try_again(tmp_path):
    def script(member):
        while True:
            view = member.next_view(20)
            if view.epoch in (2, 4):
                lose_far(member, view)
            elif view.epoch == 5:
                return "done"
            elif view.epoch in (1, 3):
                lose_link(member, view)
            else:
                train_on(member, view)

    told, dropped = supervise_far(tmp_path, script)
    assert told == [f"{REASON}; connections to all ports of these machines must be let through"] * 2
    assert dropped == [], "steps were made in between"


def test_where_they_cannot_connect_again_one_is_dropped_and_the_other_goes_on_from_memory(tmp_path):
    steps = {}

    def script(member):
        while True:
            view = member.next_view(20)
            steps[view.names, view.epoch] = view.step
            if view.epoch in (2, 3):
                lose_far(member, view)
            elif view.epoch == 4:
                return "done"
            elif view.epoch == 1:
                lose_link(member, view)
            else:
                train_on(member, view)

    told, dropped = supervise_far(tmp_path, script)
    words = f"far is dropped: {REASON}; let connections to all ports through, then start its agent again"
    assert told == [f"{REASON}; connections to all ports of these machines must be let through", words]
    assert dropped == [("far", words)]
    assert steps[("w0",), 4] == 6
