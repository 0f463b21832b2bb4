"""Decisions of the coordinator in single cases, which the model may seldom meet."""

import pytest

from paceline.elastic.facts import (
    AllEnded,
    Announce,
    AskForBoundary,
    Died,
    Finished,
    GiveUp,
    HostLost,
    Kill,
    LeaveAsked,
    Offered,
    Ready,
    RestartAll,
    Scaled,
    Silent,
    StartWorker,
    StopAsked,
    Voted,
    Withdrawn,
)
from paceline.elastic.protocol import Coordinator, MembershipSettings


def begin(target, **settings):
    coordinator = Coordinator(MembershipSettings(target, **settings))
    started = [action.name for action in coordinator.begin()]
    for name in started:
        actions = coordinator.handle(Ready(name))
    return coordinator, actions


def test_all_begin_together_once_they_are_there():
    coordinator = Coordinator(MembershipSettings(2, first_epoch=5))
    assert coordinator.begin() == [StartWorker("w0", 0), StartWorker("w1", 1)]
    assert coordinator.handle(Ready("w1")) == []
    (announce,) = coordinator.handle(Ready("w0"))
    view = announce.view
    assert (view.epoch, view.names, view.previous, view.step) == (5, ("w0", "w1"), (None, None), -1)


def test_a_boundary_is_asked_for_once():
    coordinator, _ = begin(2)
    assert coordinator.handle(Scaled(3)) == [StartWorker("w2", 2)]
    assert coordinator.handle(Ready("w2")) == [AskForBoundary(0)]
    assert coordinator.handle(Voted("w0", 0, 7)) == []


def test_workers_that_stop_unasked_are_told_to_go_on():
    coordinator, _ = begin(2)
    assert coordinator.handle(Voted("w0", 0, 7)) == []
    (announce,) = coordinator.handle(Voted("w1", 0, 7))
    assert (announce.view.epoch, announce.view.names, announce.view.step) == (1, ("w0", "w1"), 7)


def test_a_spare_takes_the_place_of_who_dies():
    coordinator, actions = begin(2, num_spares=1)
    assert StartWorker("w2", 2) in actions
    coordinator.handle(Ready("w2"))
    assert coordinator.handle(Died("w0", "killed", "w0 was killed")) == [StartWorker("w0.2", 0)]
    (announce,) = coordinator.handle(Voted("w1", 0, 7, lost="gone"))
    assert (announce.view.names, announce.view.step) == (("w1", "w2"), 7)
    assert announce.view.reason == "w0 was killed; w2 joined"


@pytest.mark.parametrize(("min_workers", "goes_on"), [(None, False), (1, True), (3, False)])
def test_who_is_left_must_be_enough(min_workers, goes_on):
    coordinator, _ = begin(3, min_workers=min_workers)
    coordinator.handle(Died("w0", "killed", "w0 was killed"))
    coordinator.handle(Died("w1", "killed", "w1 was killed"))
    (action,) = coordinator.handle(Voted("w2", 0, 3, lost="gone"))
    assert isinstance(action, Announce if goes_on else RestartAll)


@pytest.mark.parametrize("end", ["gave_up", "failed"])
def test_where_a_worker_cannot_go_on_nobody_does(end):
    coordinator, _ = begin(3)
    assert coordinator.handle(Died("w0", end, "w0 failed")) == [RestartAll("w0 failed")]


def test_without_a_whole_state_the_checkpoint_is_what_is_left():
    coordinator, _ = begin(2)
    coordinator.handle(Voted("w0", 0, 4, is_whole=False, lost="w1 is gone"))
    assert coordinator.handle(Voted("w1", 0, 4, is_whole=False, lost="w0 is gone")) == [
        RestartAll("w0: w1 is gone; w1: w0 is gone")
    ]


def test_what_several_workers_say_alike_is_told_once():
    coordinator, _ = begin(3)
    coordinator.handle(Voted("w0", 0, 4, is_whole=False, lost="the link is down"))
    coordinator.handle(Voted("w1", 0, 4, is_whole=False, lost="w0 is gone"))
    assert coordinator.handle(Voted("w2", 0, 4, is_whole=False, lost="the link is down")) == [
        RestartAll("w0, w2: the link is down; w1: w0 is gone")
    ]


def test_a_torn_state_that_is_further_does_not_win():
    coordinator, _ = begin(2)
    coordinator.handle(Voted("w0", 0, 4, is_whole=False, lost="gone"))
    (announce,) = coordinator.handle(Voted("w1", 0, 3, lost="gone"))
    assert (announce.view.names, announce.view.step) == (("w1", "w0"), 3)


def test_losses_without_progress_end_the_run():
    coordinator, _ = begin(2, max_restarts=2)
    for epoch, expected in enumerate([Announce, Announce, RestartAll]):
        coordinator.handle(Voted("w0", epoch, 4, lost="gone"))
        (action,) = coordinator.handle(Voted("w1", epoch, 4, lost="gone"))
        assert isinstance(action, expected)
    assert coordinator.handle(AllEnded(4, "they lost each other")) == [
        GiveUp("gave up after 2 restarts without progress: they lost each other")
    ]
    assert coordinator.list_outstanding() == [
        GiveUp("gave up after 2 restarts without progress: they lost each other")
    ], "who reads the journal must hear it too"


def test_progress_begins_the_count_again():
    coordinator, _ = begin(2, max_restarts=1)
    for epoch in range(5):
        coordinator.handle(Voted("w0", epoch, epoch, lost="gone"))
        (action,) = coordinator.handle(Voted("w1", epoch, epoch, lost="gone"))
        assert isinstance(action, Announce)


def test_replacements_that_end_at_once_are_not_started_for_ever():
    coordinator, _ = begin(2, max_restarts=2)
    coordinator.handle(Voted("w0", 0, 1, lost="gone"))
    actions = coordinator.handle(Died("w1", "killed", "w1 was killed"))
    num_started = 0
    while started := [action for action in actions if isinstance(action, StartWorker)]:
        num_started += 1
        actions = coordinator.handle(Died(started[0].name, "failed", "no GPU"))
    assert num_started == 3
    assert coordinator.members == ["w0"]
    assert coordinator.handle(Scaled(3)) == [StartWorker("w1.5", 1), StartWorker("w2", 2)], "a person tries again"


def test_replacements_that_ended_at_once_are_forgotten_when_all_start_again():
    coordinator, _ = begin(2, max_restarts=1)
    coordinator.handle(Voted("w0", 0, 1, lost="gone"))
    actions = coordinator.handle(Died("w1", "killed", "w1 was killed"))
    while started := [action for action in actions if isinstance(action, StartWorker)]:
        actions = coordinator.handle(Died(started[0].name, "failed", "no GPU"))
    assert coordinator.handle(Died("w0", "failed", "w0 failed")) == [RestartAll("w0 failed")]
    assert coordinator.handle(AllEnded(2, "w0 failed")) == [StartWorker("w0.2", 0), StartWorker("w1.4", 1)]


def test_a_run_that_ends_while_a_worker_waits_to_join():
    coordinator, _ = begin(2)
    coordinator.handle(Scaled(3))
    assert coordinator.handle(Ready("w2")) == [AskForBoundary(0)]
    assert coordinator.handle(Died("w0", "done", "")) == [Kill("w2", "the run has ended")]
    assert coordinator.handle(Died("w1", "done", "")) == []
    assert coordinator.handle(Died("w2", "killed", "")) == [Finished()]


def test_where_all_were_asked_to_stop_nobody_is_started():
    coordinator, _ = begin(2)
    assert coordinator.handle(StopAsked()) == []
    assert coordinator.handle(Died("w0", "done", "")) == []
    assert coordinator.handle(Died("w1", "done", "")) == [Finished()]


def test_who_was_taken_for_dead_has_no_vote():
    coordinator, _ = begin(3)
    assert coordinator.handle(Silent("w0", "it stands still"))[0] == Kill("w0", "it stands still")
    assert coordinator.handle(Voted("w0", 0, 9, lost="gone")) == []
    coordinator.handle(Voted("w1", 0, 3, lost="gone"))
    (announce,) = coordinator.handle(Voted("w2", 0, 4, lost="gone"))
    assert (announce.view.names, announce.view.previous, announce.view.step) == (("w2", "w1"), (2, 1), 4)


def test_a_worker_that_leaves_alone_gives_its_state_to_another_one_first():
    coordinator, _ = begin(1)
    assert coordinator.handle(LeaveAsked("w0")) == [StartWorker("w1", 1)]
    assert coordinator.handle(Ready("w1")) == [AskForBoundary(0)]
    announce, *_ = coordinator.handle(Voted("w0", 0, 2))
    assert announce.view.names == ("w0", "w1")
    assert coordinator.handle(Ready("w1")) == [AskForBoundary(1)]
    coordinator.handle(Voted("w1", 1, 3))
    announce, *_ = coordinator.handle(Voted("w0", 1, 3))
    assert announce.view.names == ("w1",)


def test_who_was_left_out_does_not_join_again():
    coordinator, _ = begin(2)
    assert coordinator.handle(Scaled(1)) == [AskForBoundary(0)]
    coordinator.handle(Voted("w0", 0, 3))
    announce, *_ = coordinator.handle(Voted("w1", 0, 3))
    assert announce.view.names == ("w0",)
    (started,) = coordinator.handle(Scaled(2))
    assert isinstance(started, StartWorker)
    assert coordinator.handle(Ready("w1")) == [], "what it said before it was left out came late"
    assert coordinator.handle(Ready(started.name)) == [AskForBoundary(1)]
    announce, *_ = coordinator.handle(Voted("w0", 1, 5))
    assert announce.view.names == ("w0", started.name)


def test_workers_that_must_stay_the_same_start_again_together():
    coordinator = Coordinator(MembershipSettings(2))
    coordinator.begin()
    coordinator.handle(Ready("w0", "the model is split"))
    coordinator.handle(Ready("w1", "the model is split"))
    assert coordinator.handle(Died("w1", "killed", "w1 was killed")) == [RestartAll("w1 was killed")]
    assert coordinator.handle(AllEnded(3, "w1 was killed")) == [StartWorker("w0.2", 0), StartWorker("w1.2", 1)]


def begin_with_another_machine():
    """Return a coordinator whose epoch 1 has w0 here, and two workers on another machine."""
    coordinator, _ = begin(1)
    assert coordinator.handle(Offered("b", 2)) == [StartWorker("w0@b", 0), StartWorker("w1@b", 1)]
    assert coordinator.handle(Offered("b", 2)) == [], "what is said twice is done once"
    coordinator.handle(Ready("w0@b"))
    coordinator.handle(Ready("w1@b"))
    (announce,) = coordinator.handle(Voted("w0", 0, 3))
    assert announce.view.names == ("w0", "w0@b", "w1@b")
    return coordinator


def test_workers_of_a_lost_machine_count_as_lost_and_are_not_replaced():
    coordinator = begin_with_another_machine()
    assert coordinator.handle(HostLost("b", "b no longer answers")) == []
    assert coordinator.is_broken, "who is left is told at once"
    (action,) = coordinator.handle(Voted("w0", 1, 5, lost="gone"))
    assert action == RestartAll("b no longer answers"), "one of three is less than half"
    assert coordinator.handle(AllEnded(5, "lost")) == [StartWorker("w0.2", 0)]
    assert coordinator.handle(Offered("b", 1)) == [StartWorker("w0.2@b", 0)], "it may come back"


def test_a_machine_that_is_withdrawn_leaves_at_a_boundary():
    coordinator = begin_with_another_machine()
    assert coordinator.handle(Withdrawn("b")) == [AskForBoundary(1)]
    assert coordinator.handle(Withdrawn("b")) == [], "what is said twice is done once"
    for name in ("w0", "w0@b"):
        coordinator.handle(Voted(name, 1, 5))
    (announce,) = coordinator.handle(Voted("w1@b", 1, 5))
    assert (announce.view.names, announce.view.reason) == (("w0",), "w0@b left; w1@b left")
    for name in ("w0@b", "w1@b"):
        assert coordinator.handle(Died(name, "done", "")) == []
    assert coordinator.handle(Scaled(2)) == [StartWorker("w1", 1)], "its places are given to nobody"


def test_who_leads_from_another_machine_hands_on_at_the_next_boundary():
    coordinator = begin_with_another_machine()
    coordinator.handle(Died("w1@b", "killed", "w1@b was killed"))
    coordinator.handle(Voted("w0", 1, 4, lost="gone"))
    (announce,) = coordinator.handle(Voted("w0@b", 1, 5, lost="gone"))
    assert (announce.view.names, announce.view.step) == (("w0@b", "w0"), 5)
    assert coordinator.handle(Scaled(2))[0] == AskForBoundary(2), "though nobody joins or leaves"
    coordinator.handle(Voted("w0@b", 2, 6))
    (announce,) = coordinator.handle(Voted("w0", 2, 6))
    assert announce.view.names == ("w0", "w0@b")


def test_a_coordinator_that_is_made_again_starts_who_was_not_started_and_gives_as_much_time_to_leave():
    coordinator = Coordinator(MembershipSettings(2))
    coordinator.begin()
    assert coordinator.list_outstanding() == [StartWorker("w0", 0), StartWorker("w1", 1)], "again: known ones stay"
    coordinator.handle(Ready("w0"))
    (announce,) = coordinator.handle(Ready("w1"))
    coordinator.handle(LeaveAsked("w1", 25.0))
    assert coordinator.workers["w1"].within_s == 25.0
    coordinator.handle(Silent("w0", "it stands still"))
    kill, *others = coordinator.list_outstanding()
    assert kill == Kill("w0", "it stood still")
    assert others[-2:] == [announce, AskForBoundary(0)]
    assert [action.name for action in others[:-2]] == [name for name in coordinator.workers if name != "w0"]


FIXED = "ranks of the layout share a model"


def begin_in_places(target, **settings):
    coordinator = Coordinator(MembershipSettings(target, **settings))
    for action in coordinator.begin():
        coordinator.handle(Ready(action.name, fixed=FIXED))
    return coordinator


def test_a_place_that_must_be_taken_waits_for_its_new_worker():
    coordinator = begin_in_places(4)
    assert coordinator.handle(Died("w1", "killed", "w1 was killed")) == [StartWorker("w1.2", 1)]
    for name in ("w0", "w2", "w3"):
        assert coordinator.handle(Voted(name, 0, 7, lost="w1 was killed")) == [], "three of four cannot train"
    (announce,) = coordinator.handle(Ready("w1.2", fixed=FIXED))
    view = announce.view
    assert (view.names, view.previous, view.step) == (("w0", "w1.2", "w2", "w3"), (0, None, 2, 3), 7)


def test_a_part_of_the_model_that_is_lost_is_replaced_even_if_all_are_to_stop():
    coordinator = begin_in_places(2, num_spares=0)
    coordinator.handle(StopAsked())
    assert coordinator.handle(Died("w1", "killed", "w1 was killed")) == [StartWorker("w1.2", 1)]
    assert coordinator.handle(Voted("w0", 0, 7, lost="w1 was killed")) == []
    assert coordinator.handle(Died("w1.2", "killed", "the signal met it too")) == [StartWorker("w1.3", 1)]
    (announce,) = coordinator.handle(Ready("w1.3", fixed=FIXED))
    assert (announce.view.names, announce.view.step) == (("w0", "w1.3"), 7), "what they have can be saved"
    assert coordinator.handle(Died("w0", "done", "")) == []


def test_a_spare_takes_a_place_at_once_and_nobody_else_moves():
    coordinator = begin_in_places(2, num_spares=1)
    coordinator.handle(Ready("w2", fixed=FIXED))
    coordinator.handle(Died("w0", "killed", "w0 was killed"))
    (announce,) = coordinator.handle(Voted("w1", 0, 7, lost="w0 was killed"))
    assert announce.view.names == ("w2", "w1")


def test_nobody_waits_for_a_place_that_nobody_takes():
    coordinator = begin_in_places(2, max_restarts=1)
    (started,) = coordinator.handle(Died("w1", "killed", "w1 was killed"))
    assert coordinator.handle(Voted("w0", 0, 7, lost="w1 was killed")) == []
    (started,) = coordinator.handle(Died(started.name, "killed", "it was killed too"))
    assert coordinator.handle(Died(started.name, "killed", "it was killed too")) == [RestartAll("w1 was killed")]


def test_too_few_places_left_start_again_together():
    coordinator = begin_in_places(4)
    for name in ("w1", "w2", "w3"):
        coordinator.handle(Died(name, "killed", f"{name} was killed"))
    assert RestartAll("w1 was killed; w2 was killed; w3 was killed") in coordinator.handle(Voted("w0", 0, 7, lost="w1"))


def test_workers_with_places_of_their_own_are_as_many_as_before():
    coordinator = begin_in_places(2)
    assert AskForBoundary(0) not in coordinator.handle(Scaled(3))
