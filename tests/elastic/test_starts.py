"""Workers that do not begin, and builds that do not end, on a scripted clock."""

import pytest

from paceline.elastic.facts import Died, Kill, Ready, RestartAll, StartWorker, Voted
from paceline.elastic.member import Status
from paceline.elastic.protocol import Coordinator, MembershipSettings
from paceline.elastic.watch import Patience, Watch


class Lab:
    """A coordinator of workers, and what watches their signs of life."""

    def __init__(self, num_workers, **patience):
        self.now_s, self.told, self.killed, self.beats = 0.0, [], {}, {}
        self.coordinator = Coordinator(MembershipSettings(num_workers))
        locate = " (pid {})".format
        self.watch = Watch(self.coordinator, locate, self.told.append, Patience(**patience), lambda: self.now_s)
        self.broken_s = None
        self.actions = []
        self.do(self.coordinator.begin())

    def do(self, actions):
        self.actions += actions
        for action in actions:
            if isinstance(action, StartWorker):
                self.watch.begin(action.name)

    def feed(self, fact):
        self.do(self.coordinator.handle(fact))

    def say(self, *names, **status):
        """Let workers say how they are now, and in each second from now on."""
        for name in names:
            self.beats[name] = status
            self._beat(name)
            if status.get("phase") == "ready":
                self.feed(Ready(name, fixed="a layout" if self.coordinator.fixed else ""))

    def _beat(self, name):
        beats = self.watch._beats[name][0] + 1
        self.watch.note(name, Status(beat=beats, **self.beats[name]), self.now_s)

    def wait_until(self, now_s):
        """Pass the time second by second, and kill who stands still."""
        while self.now_s < now_s:
            self.now_s += 1.0
            for name in self.beats:
                self._beat(name)
            for silent in self.watch.find_silent(self.broken_s):
                self.killed[silent.name] = silent.reason
                self.beats.pop(silent.name, None)
                self.feed(silent)

    def end(self, name):
        self.beats.pop(name, None)
        self.watch.forget(name)
        self.feed(Died(name, "killed", f"{name} was killed by SIGKILL"))


def test_who_gives_no_first_beat_is_told_of_and_replaced_alone():
    lab = Lab(2)
    lab.now_s = 2.0
    lab.say("w0", phase="ready")
    lab.wait_until(19)
    assert (lab.told, lab.killed) == ([], {})
    lab.wait_until(20)
    assert lab.told == ["w1 has not begun 20 s after it was started (phase starting) (pid w1)"]
    lab.wait_until(60)
    assert lab.killed == {}
    lab.wait_until(61)
    assert list(lab.killed) == ["w1"]
    assert lab.killed["w1"].startswith("w1 has not begun 61 s after it was started (phase starting) (pid w1); in this")
    lab.end("w1")
    lab.say("w1.2", phase="ready")
    assert lab.coordinator.view.names == ("w0", "w1.2")
    assert len(lab.told) == 1
    assert not any(isinstance(action, RestartAll) for action in lab.actions)


def test_while_the_others_train_on_as_well():
    lab = Lab(2)
    lab.say("w0", "w1", phase="ready")
    lab.say("w0", "w1", phase="training", epoch=0, place="is in phase forward of step 3")
    lab.end("w1")
    lab.feed(Voted("w0", 0, 3, lost="gone"))
    assert lab.coordinator.view.names == ("w0",)
    lab.wait_until(61)
    assert list(lab.killed) == ["w1.2"]
    assert [name.name for name in lab.actions if isinstance(name, StartWorker)][-1] == "w1.3"


def test_a_start_may_take_several_times_what_others_took():
    lab = Lab(2)
    lab.now_s = 30.0
    lab.say("w0", phase="ready")
    lab.wait_until(119)
    assert lab.killed == {}
    assert len(lab.told) == 1
    lab.wait_until(121)
    assert list(lab.killed) == ["w1"]


def test_while_nobody_has_begun_nobody_is_judged_but_people_are_told_less_and_less_often():
    lab = Lab(1)
    lab.wait_until(1000)
    assert lab.killed == {}
    assert [words.split()[4] for words in lab.told] == ["45", "180", "720"]


def test_who_follows_one_that_was_given_up_has_twice_the_time():
    lab = Lab(2)
    lab.say("w0", phase="ready")
    lab.wait_until(61)
    lab.end("w1")
    lab.wait_until(61 + 120)
    assert list(lab.killed) == ["w1"]
    lab.wait_until(61 + 124)
    assert list(lab.killed) == ["w1", "w1.2"]


def test_another_machine_may_take_longer():
    lab = Lab(2)
    worker = lab.coordinator.workers.pop("w1")
    lab.coordinator.workers["w1@far"] = worker
    lab.watch.forget("w1")
    lab.watch.begin("w1@far")
    lab.say("w0", phase="ready")
    lab.wait_until(300)
    assert lab.killed == {}
    lab.wait_until(301)
    assert list(lab.killed) == ["w1@far"]


def test_starts_that_never_succeed_end_the_run():
    lab = Lab(2)
    lab.say("w0", phase="ready")
    for number in range(4):
        while len(lab.killed) <= number:
            lab.wait_until(lab.now_s + 1)
        lab.end(list(lab.killed)[-1])
    assert isinstance(lab.actions[-1], RestartAll)
    assert lab.actions[-1].reason == "w1.4 was killed by SIGKILL"


def begin_layout(**patience):
    """Return a lab of three workers of a layout, the last of which was replaced, and builds."""
    lab = Lab(3, **patience)
    lab.coordinator.fixed = "a layout"
    lab.say("w0", "w1", "w2", phase="ready")
    lab.say("w0", "w1", "w2", phase="training", epoch=0, is_building=True)
    lab.wait_until(3)
    lab.say("w0", "w1", "w2", phase="training", epoch=0, place="is in phase forward of step 3")
    lab.end("w2")
    for name in ("w0", "w1"):
        lab.feed(Voted(name, 0, 3, lost="gone"))
    return lab


def join(lab):
    lab.say("w2.2", phase="ready")
    assert lab.coordinator.view.names == ("w0", "w1", "w2.2")
    lab.broken_s = None
    lab.say("w2.2", phase="training", epoch=1, is_building=True)


@pytest.mark.parametrize(("hang_timeout_s", "limit_s"), [(60.0, 60), (15.0, 15), (8.0, 12)])
def test_a_replacement_whose_build_does_not_end_is_killed_while_others_wait(hang_timeout_s, limit_s):
    """Builds took 3 s."""
    lab = begin_layout(standstill_s=hang_timeout_s)
    join(lab)
    lab.say("w0", "w1", phase="training", epoch=1, waits=True, place="is in phase forward of step 3", still_s=5.0)
    began_s = lab.now_s
    lab.wait_until(began_s + limit_s)
    assert lab.killed == {}
    assert [words.split(" for ")[0] for words in lab.told] == ["w2.2 has been building"]
    lab.wait_until(began_s + limit_s + 1)
    assert list(lab.killed) == ["w2.2"]
    assert "(phase building), and has made no step yet (pid w2.2); in this run it took 3.0 s" in lab.killed["w2.2"]
    assert [action.name for action in lab.actions if isinstance(action, Kill)] == ["w2.2"]
    lab.end("w2.2")
    for name in ("w0", "w1"):
        lab.feed(Voted(name, 1, 3, lost="gone"))
    lab.say("w2.3", phase="ready")
    assert lab.coordinator.view.names == ("w0", "w1", "w2.3")
    assert lab.killed["w2.2"] in lab.coordinator.view.reason


def test_the_same_where_the_others_have_given_up_and_accuse_nobody():
    lab = begin_layout()
    join(lab)
    for name in ("w0", "w1"):
        lab.say(name, phase="lost", epoch=1)
        lab.feed(Voted(name, 1, 3, lost="it took too long"))
    lab.broken_s = lab.now_s
    lab.wait_until(lab.now_s + 62)
    assert list(lab.killed) == ["w2.2"]


def test_two_that_build_for_ever_are_both_killed():
    lab = begin_layout()
    lab.say("w1", phase="training", epoch=0, is_building=True)
    join(lab)
    lab.say("w1", phase="training", epoch=1, is_building=True)
    lab.say("w0", phase="training", epoch=1, waits=True)
    lab.wait_until(lab.now_s + 80)
    assert sorted(lab.killed) == ["w1", "w2.2"]


@pytest.mark.parametrize("of_others", [{"phase": "training"}, {"phase": "training", "waits": True}])
def test_nobody_is_judged_who_builds_while_another_gets_on_or_from_a_checkpoint(of_others):
    lab = begin_layout()
    join(lab)
    if of_others.get("waits"):  # as at the first start, or after a restart
        object.__setattr__(lab.coordinator.view, "step", -1)
    lab.say("w0", "w1", epoch=1, **of_others)
    lab.wait_until(250)
    assert lab.killed == {}
    assert any(words.startswith("w2.2 has been building") for words in lab.told) == bool(of_others.get("waits"))


def test_those_who_wait_are_not_told_of_by_their_last_phase():
    lab = begin_layout()
    lab.say("w2.2", phase="ready")
    lab.say("w0", phase="lost", epoch=1, place="is in phase forward of step 3", still_s=400.0)
    lab.say(
        "w1",
        phase="training",
        epoch=1,
        place="is in phase forward of step 3",
        still_s=400.0,
        is_building=True,
        waits=True,
    )
    place = {"place": "is in phase data of step 3", "connecting": "w0, w1"}
    lab.say("w2.2", phase="training", epoch=1, still_s=400.0, **place)
    lab.wait_until(lab.now_s + 1)
    (words,) = lab.told
    assert words.endswith(
        ": w1 waits for the others (pid w1); w2.2 is connecting to w0, w1 (pid w2.2); w0 waits for the next epoch"
    )


def test_nobody_stands_still_while_one_begins():
    lab = begin_layout()
    lab.broken_s = lab.now_s
    lab.say("w0", "w1", phase="lost", epoch=0, place="is in phase forward of step 3", still_s=100.0)
    lab.wait_until(lab.now_s + 19)
    assert lab.told == []
    lab.wait_until(lab.now_s + 1)
    assert lab.told == ["w2.2 has not begun 20 s after it was started (phase starting) (pid w2.2)"]
