"""The membership protocol where workers and the coordinator crash, and messages are lost, doubled and overtaken."""

import inspect

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from elastic import test_protocol as cases
from elastic.membership_world import NUM_STEPS, World
from paceline.elastic import protocol
from paceline.elastic.facts import (
    Announce,
    AskForBoundary,
    Finished,
    Kill,
    LeaveAsked,
    Offered,
    RestartAll,
    Scaled,
    Silent,
    StartWorker,
    Withdrawn,
)
from paceline.elastic.protocol import Coordinator, MembershipSettings

NUM_EXAMPLES = 800
"""Examples that the protocol passes, and in which mutants are noticed: in others the protocol itself might fail."""
FEW_EXAMPLES = 200
"""Enough for most mutants; those are looked for with all examples."""
numbers = st.integers(0, 5)


class Membership(RuleBasedStateMachine):
    coordinator: type = Coordinator

    @initialize(
        size=st.integers(1, 4),
        min_workers=st.sampled_from([None, 1]),
        num_spares=st.integers(0, 1),
        max_restarts=st.sampled_from([3, 1000]),
        first_epoch=st.sampled_from([0, 3]),
    )
    def begin(self, size, **chosen):
        self.world = World(MembershipSettings(target=size, **chosen), self.coordinator)

    def pick(self, number, names=None):
        names = sorted(self.world.processes) if names is None else names
        return names[number % len(names)] if names else None

    @rule(number=numbers)
    def deliver(self, number):
        if self.world.network:
            self.world.feed(self.world.network.pop(number % len(self.world.network)))

    @rule(number=numbers)
    def deliver_twice(self, number):
        if self.world.network:
            self.world.feed(self.world.network[number % len(self.world.network)])

    @rule(number=numbers)
    def drop(self, number):
        if self.world.network:
            self.world.network.pop(number % len(self.world.network))

    @rule()
    def tell_of_deaths(self):
        while self.world.local and self.world.coordinator is not None:
            self.world.feed(self.world.local.pop(0))

    @rule()
    def everybody_speaks(self):
        for name in list(self.world.processes):
            self.world.say(name)

    @rule(number=numbers)
    def look(self, number):
        if name := self.pick(number):
            self.world.look(name)

    @rule(hears_of_deaths=st.booleans())
    def all_get_on(self, hears_of_deaths):
        if not self.world.end:
            self.world._do_everything(NUM_STEPS - 1, hears_of_deaths=hears_of_deaths)

    @rule(num_rounds=st.integers(1, 6), hears_of_deaths=st.booleans())
    def all_get_on_for_a_while(self, num_rounds, hears_of_deaths):
        for _ in range(num_rounds):
            self.all_get_on(hears_of_deaths)

    @rule(number=numbers, wrongly=st.booleans())
    def notice(self, number, wrongly):
        if name := self.pick(number):
            self.world.notice(name, wrongly=wrongly)

    @rule(victim=st.none() | numbers)
    def enter(self, victim):
        for epoch in self.world.list_complete("opening"):
            self.world.enter(epoch, victim)

    @rule()
    def stop_at_boundary(self):
        self.world.stop_at_boundary()

    @rule(victim=st.none() | numbers, done=st.sets(numbers))
    def step(self, victim, done):
        for epoch in self.world.list_complete("training"):
            self.world.step(epoch, victim, done)

    @rule()
    def save(self):
        self.world.save()

    @rule(number=numbers)
    def kill(self, number):
        if name := self.pick(number):
            self.world.die(name, "killed")

    @rule(number=numbers)
    def freeze(self, number):
        if name := self.pick(number):
            self.world.processes[name].is_frozen = True

    @rule(number=numbers)
    def suspect(self, number):
        """Take a worker for dead, rightly or not."""
        if name := self.pick(number):
            self.world.feed(Silent(name, "it stands still"))

    @rule(size=st.integers(1, 4))
    def scale(self, size):
        self.world.feed(Scaled(size))

    @rule(few=st.integers(1, 3), many=st.integers(2, 4))
    def scale_there_and_back(self, few, many):
        """Leave workers out, and want as many again before the coordinator hears that those have ended."""
        for size in (few, many):
            self.scale(size)
            for _ in range(3):
                self.all_get_on(hears_of_deaths=False)

    @rule(number=numbers)
    def ask_to_leave(self, number):
        if name := self.pick(number):
            self.world.feed(LeaveAsked(name))

    @rule(host=st.sampled_from("ab"), size=st.integers(1, 2))
    def offer(self, host, size):
        if self.world.coordinator is None or self.world.coordinator.target + size <= 5:
            self.world.feed(Offered(host, size))

    @rule(host=st.sampled_from("ab"))
    def withdraw(self, host):
        self.world.feed(Withdrawn(host))

    @rule(host=st.sampled_from("ab"))
    def lose_host(self, host):
        self.world.lose_host(host)

    @rule(when=st.integers(0, 4) | st.sampled_from([Announce, AskForBoundary, Kill, RestartAll, StartWorker]))
    def crash_coordinator_soon(self, when):
        self.world.crash_after = when

    @rule(when=st.sampled_from([Announce, AskForBoundary, Kill, RestartAll, StartWorker]))
    def crash_coordinator_when_a_worker_dies(self, when):
        if name := self.pick(0):
            self.world.crash_after = when
            self.world.die(name, "killed")
            self.all_get_on_for_a_while(num_rounds=3, hears_of_deaths=True)

    @rule()
    def recover_coordinator(self):
        self.world.recover()

    @invariant()
    def agree(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.run_without_faults()
            if self.world.settings.max_restarts > 3:
                assert self.world.end == Finished()


def check_model(coordinator, num_examples=NUM_EXAMPLES):
    """Run the model with a class of coordinators.

    Raises:
        AssertionError: The protocol breaks a rule.
    """
    machine = type("Machine", (Membership,), {"coordinator": coordinator})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_examples", [FEW_EXAMPLES, pytest.param(NUM_EXAMPLES, marks=pytest.mark.slow)])
def test_no_view_is_doubled_no_update_lost_and_training_gets_on(num_examples):
    check_model(Coordinator, num_examples)


MUTANTS = {
    "a vote of an older epoch counts": (
        "fact.epoch == self.epoch and ",
        "",
    ),
    "the least advanced wins": (
        "best = max(vote.step",
        "best = min(vote.step",
        cases.test_who_was_taken_for_dead_has_no_vote,
    ),
    "a torn state wins": (
        "for vote in votes if vote.is_whole and vote.step == best",
        "for vote in votes if vote.step >= best",
        cases.test_a_torn_state_that_is_further_does_not_win,
    ),
    "torn states count as the most advanced": (
        "best = max(vote.step for vote in votes if vote.is_whole)",
        "best = max(vote.step for vote in votes)",
        cases.test_a_torn_state_that_is_further_does_not_win,
    ),
    "votes are not awaited": (
        "if len(self._list_votes()) == len(self.members) and",
        "if self._list_votes() and",
    ),
    "half of the votes is enough": (
        "== len(self.members) and",
        ">= len(self.members) / 2 and",
    ),
    "votes outlive their epoch": (
        "            worker.vote = None\n",
        "            pass\n",
    ),
    "the epoch is not counted on": (
        "        self.epoch += 1\n        previous",
        "        previous",
    ),
    "who is being killed is waited for": (
        "and not self.workers[name].is_doomed]\n\n    def counts",
        "]\n\n    def counts",
    ),
    "a death is no loss": (
        "self._lost[fact.name] = fact.reason\n        is_final",
        "is_final",
    ),
    "nobody is asked for a boundary": (
        "actions = [AskForBoundary(self.epoch)]",
        "pass",
    ),
    "a boundary is asked for, but not remembered": (
        "self._is_asked = True\n",
        "pass\n",
        cases.test_a_boundary_is_asked_for_once,
    ),
    "dead workers are not replaced": (
        "for _ in range(-num_surplus):",
        "for _ in range(wanted - len(self._num_started)):",
    ),
    "the dead are taken in again": (
        "del self.workers[fact.name]",
        "pass",
    ),
    "a new worker counts as one with state": (
        "old.index(name) if name in old else None",
        "old.index(name) if name in old else 0",
    ),
    "the first is not rank 0": (
        "names = [first, *staying]",
        "names = [*staying, first]",
    ),
    "an evicted worker joins again": (
        "worker.is_evicted or worker.is_doomed or worker.is_leaving",
        "worker.is_doomed or worker.is_leaving",
    ),
    "evicted workers are not marked": (
        "            self.workers[name].is_evicted = True\n        self._begin",
        "            pass\n        self._begin",
    ),
    "too many are taken in": (
        "[: size - len(names)]",
        "",
    ),
    "a restart keeps its view": (
        "self.workers, self.view, self.is_restarting, self._is_ending = {}, None, False, False",
        "self.workers, self.is_restarting, self._is_ending = {}, False, False",
    ),
    "a slot is given twice": (
        "if slot not in taken)",
        ")",
    ),
    "an outstanding view is forgotten": (
        "actions.append(Announce(self.view))",
        "pass",
    ),
    "an outstanding restart is forgotten": (
        'return [RestartAll("the launcher was lost while it ended the workers")]',
        "return []",
    ),
    "a leaving worker that is alone never leaves": (
        "self.target + self.workers[first].is_leaving",
        "self.target",
        cases.test_a_worker_that_leaves_alone_gives_its_state_to_another_one_first,
    ),
    "workers of a lost machine are no loss": (
        'actions += self._note_death(Died(name, "killed", fact.reason), self.workers[name])',
        "del self.workers[name]",
        cases.test_workers_of_a_lost_machine_count_as_lost_and_are_not_replaced,
    ),
    "a machine has more workers than it offers": (
        "slot < self.places[host]",
        "slot < 9",
    ),
    "who leads from elsewhere leads on": (
        "return bool(here) and bool(host_of(self.members[0]))",
        "return False",
        cases.test_who_leads_from_another_machine_hands_on_at_the_next_boundary,
    ),
    "a machine that is withdrawn is still wanted": (
        "num_places, self.places[host] = self.places[host], 0",
        "num_places = self.places[host]",
        cases.test_a_machine_that_is_withdrawn_leaves_at_a_boundary,
    ),
    "spares outlive the run": (
        'return self._dismiss(self._list_idle(), "the run has ended")',
        "return []",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant, monkeypatch):
    """The model catches it, or the single case that is named with it, which the model may seldom meet."""
    old, new, *named = MUTANTS[mutant]
    source = inspect.getsource(protocol)
    assert source.count(old) == 1, "the line has changed: change the mutant too"
    place = {"__name__": "mutant"}
    exec(compile(source.replace(old, new), "mutant", "exec"), place)
    monkeypatch.setattr(cases, "Coordinator", place["Coordinator"])
    try:
        for case in named:
            case()
        if not named:
            check_model(place["Coordinator"])
    except Flaky:  # what hypothesis makes of a time limit, which catches nothing
        raise
    except Exception:
        return
    pytest.fail("nothing noticed it")
