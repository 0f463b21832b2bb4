"""Admission policies: the bound is never broken, and somebody may always go on."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.sync.parameter_server.clocks import BoundedClocks, FollowedQuorum, FreeClocks, Quorum


class Bounded(RuleBasedStateMachine):
    """Workers that compute, tell of their step, wait to read, die, leave and come back, in any order.

    The model knows of each worker which of its steps are in: those that it told of since it last joined, and all
    before it joined. The policy under test knows clocks only.
    """

    @initialize(staleness=st.integers(0, 4), num_workers=st.integers(1, 5))
    def begin(self, staleness, num_workers):
        self.clocks = BoundedClocks(staleness)
        self.staleness = staleness
        self.told = {}  # steps that are in, by live worker
        self.waiting = set()
        self.gone = {}  # clocks of those that left
        for worker in range(num_workers):
            self.told[worker] = self.clocks.join(worker)

    @precondition(lambda self: set(self.told) - self.waiting)
    @rule(data=st.data())
    def tell(self, data):
        worker = data.draw(st.sampled_from(sorted(set(self.told) - self.waiting)))
        self.clocks.tick(worker)
        self.told[worker] += 1
        self.waiting.add(worker)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def try_to_read(self, data):
        worker = data.draw(st.sampled_from(sorted(self.waiting)))
        if self.clocks.may_read(worker):
            clock = self.told[worker]
            seen = min(self.told.values())  # all steps below are in
            assert seen > clock - self.staleness - 1, "a read that misses updates it must see"
            self.waiting.remove(worker)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def go(self, data):
        worker = data.draw(st.sampled_from(sorted(self.told)))  # one that waits may die too
        self.clocks.leave(worker)
        self.gone[worker] = self.told.pop(worker)
        self.waiting.discard(worker)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def come_back(self, data):
        worker = data.draw(st.sampled_from(sorted(self.gone)))
        clock = self.clocks.join(worker, self.gone[worker])
        assert clock >= self.gone.pop(worker)
        assert clock >= min(self.told.values(), default=0), "nobody may have to wait for a past that will not come"
        self.told[worker] = clock

    @invariant()
    def somebody_can_go_on(self):
        """Who waits, waits for one that computes: else all would wait for ever."""
        if self.waiting and self.waiting == set(self.told):
            assert any(self.clocks.may_read(worker) for worker in self.waiting)

    @invariant()
    def the_slowest_never_waits(self):
        for worker in self.waiting:
            if self.told[worker] == min(self.told.values()):
                assert self.clocks.may_read(worker)

    @invariant()
    def who_waits_needs_to(self):
        """Nobody is held up by more than the bound asks for."""
        for worker in self.waiting:
            if not self.clocks.may_read(worker):
                assert min(self.told.values()) < self.told[worker] - self.staleness


class Backups(RuleBasedStateMachine):
    """Workers of one step after another, each done when enough have come."""

    @initialize(num_workers=st.integers(1, 6), num_backups=st.integers(0, 3))
    def begin(self, num_workers, num_backups):
        self.num_backups = min(num_backups, num_workers - 1)
        self.quorum = Quorum(self.num_backups)
        self.live = set(range(num_workers))
        self.at = {worker: self.quorum.join(worker) for worker in self.live}  # the step that a worker computes
        self.waiting = set()
        self.counted = set()

    def settle(self):
        while self.quorum.is_complete:
            num_needed = len(self.live | self.counted) - self.num_backups
            assert len(self.counted) >= max(num_needed, 1)
            self.quorum.advance()
            self.counted = set()
        for worker in sorted(self.waiting):
            if self.quorum.may_read(worker):
                self.quorum.read(worker)
                assert self.quorum.step > self.at[worker]
                self.at[worker] = self.quorum.step
                self.waiting.discard(worker)

    @precondition(lambda self: self.live - self.waiting)
    @rule(data=st.data())
    def tell(self, data):
        worker = data.draw(st.sampled_from(sorted(self.live - self.waiting)))
        is_late = self.at[worker] < self.quorum.step
        assert self.quorum.is_late(worker) == is_late
        if not is_late:
            self.counted.add(worker)
        self.quorum.tick(worker)
        self.waiting.add(worker)
        self.settle()
        if is_late:
            assert worker not in self.waiting, "who comes too late waits for nobody"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def go(self, data):
        worker = data.draw(st.sampled_from(sorted(self.live)))
        self.quorum.leave(worker)
        self.live.discard(worker)
        self.waiting.discard(worker)
        self.settle()

    @rule(worker=st.integers(0, 5))
    def come(self, worker):
        if worker not in self.live and worker not in self.counted:
            self.at[worker] = self.quorum.join(worker)
            assert self.at[worker] == self.quorum.step
            self.live.add(worker)

    @invariant()
    def somebody_can_go_on(self):
        assert not self.waiting or self.waiting != self.live, "all wait for each other"

    @invariant()
    def who_waits_has_been_counted(self):
        assert self.waiting <= self.counted


class TwoServers(RuleBasedStateMachine):
    """Workers that push to two servers, the second of which follows the first; everything on its way may be late.

    On its way is, by receiver and sender, a list of: a worker's clock, pushed with or without a gradient; its death,
    its leave, and its return with the clock that the first server gave it; and from the first server the announcements.
    """

    @initialize(num_workers=st.integers(1, 5), num_backups=st.integers(0, 3))
    def begin(self, num_workers, num_backups):
        self.servers = [Quorum(min(num_backups, num_workers - 1)), FollowedQuorum()]
        self.sent = {(server, worker): [] for server in range(2) for worker in range(num_workers)}
        self.announcements, self.taken = [], {}
        self.computing, self.away, self.dead = set(range(num_workers)), set(), set()
        self.clocks = {}  # of each worker at each server; None while it waits for a reply from there
        self.asking = set()  # pairs of server and worker whose push has come and has no reply
        self.gradients = [set(), set()]  # pairs of worker and step that have come to each server
        for server, worker in self.sent:
            self.clocks[server, worker] = self.servers[server].join(worker)

    def live(self):
        return {worker for _, worker in self.clocks} - self.dead

    def settle(self, number):
        server = self.servers[number]
        while server.is_complete:
            taken, step = server.advance(), server.step - 1
            if number == 0:
                self.taken[step] = taken
                self.announcements.append((step, taken))
            assert all((worker, step) in self.gradients[number] for worker in taken)
            assert taken <= self.taken[step]
            assert self.taken[step] - taken <= self.dead, "the servers take the gradients of others"
        for worker in sorted(self.live()):
            if (number, worker) in self.asking and server.may_read(worker):
                server.read(worker)
                self.asking.discard((number, worker))
                self.clocks[number, worker] = server.clocks[worker]
                self.catch_up(worker)

    def catch_up(self, worker):
        clocks = [self.clocks[number, worker] for number in range(2)]
        if None in clocks or worker in self.dead:
            return
        if clocks[0] == clocks[1]:
            self.computing.add(worker)
            return
        self.send(clocks.index(min(clocks)), worker, "without")

    def send(self, number, worker, kind):
        self.sent[number, worker].append((self.clocks[number, worker], kind))
        self.clocks[number, worker] = None

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def push(self, data):
        self.begin_push(data.draw(st.sampled_from(sorted(self.computing))))

    def begin_push(self, worker):
        self.computing.discard(worker)
        for number in range(2):
            self.send(number, worker, "with a gradient")

    @precondition(lambda self: any(self.sent.values()))
    @rule(data=st.data())
    def receive(self, data):
        number, worker = data.draw(st.sampled_from(sorted(key for key, sent in self.sent.items() if sent)))
        self.deliver(number, worker)

    def deliver(self, number, worker):
        server = self.servers[number]
        clock, kind = self.sent[number, worker].pop(0)
        if kind in ("dies", "goes"):
            server.leave(worker)
            if kind == "goes" and worker not in self.dead:
                self.away.add(worker)
        elif kind == "comes":  # the dead may have sent it, and die in the message after
            self.clocks[0, worker], self.clocks[number, worker] = clock, server.join(worker, clock)
            self.catch_up(worker)
        else:
            has_gradient = kind == "with a gradient"
            assert server.clocks[worker] == clock
            if has_gradient:
                self.gradients[number].add((worker, clock))
            assert number or has_gradient or server.is_late(worker), "the first server counts who has nothing"
            server.tick(worker)
            self.asking.add((number, worker))
        self.settle(number)

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def go(self, data):
        worker = data.draw(st.sampled_from(sorted(self.computing)))
        self.computing.discard(worker)
        self.servers[0].leave(worker)
        self.settle(0)
        self.sent[1, worker].append((None, "goes"))

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def come(self, data):
        self.begin_return(data.draw(st.sampled_from(sorted(self.away))))

    def begin_return(self, worker):
        self.away.discard(worker)
        clock = self.servers[0].join(worker, max(self.clocks[number, worker] for number in range(2)))
        self.sent[1, worker].append((clock, "comes"))

    @precondition(lambda self: self.announcements)
    @rule()
    def follow(self):
        self.servers[1].follow(*self.announcements.pop(0))
        self.settle(1)

    @precondition(lambda self: len(self.live()) > 1)
    @rule(data=st.data())
    def die(self, data):
        """What it had sent may be lost, to one server or both."""
        worker = data.draw(st.sampled_from(sorted(self.live())))
        self.dead.add(worker)
        self.computing.discard(worker)
        self.away.discard(worker)
        for number in range(2):
            sent = self.sent[number, worker]
            del sent[data.draw(st.integers(0, len(sent))) :]
            sent.append((None, "dies"))

    def teardown(self):
        """Once everything has come, somebody can go on, or all have gone; and both servers are at the same step."""
        if not hasattr(self, "servers"):
            return
        for _ in range(3):
            while self.announcements or any(self.sent.values()):
                for number, worker in self.sent:
                    while self.sent[number, worker]:
                        self.deliver(number, worker)
                if self.announcements:
                    self.follow()
            assert self.computing or self.away == self.live(), "who waits, waits for ever"
            assert self.servers[0].step == self.servers[1].step
            for worker in sorted(self.away):
                self.begin_return(worker)
            for worker in sorted(self.computing):
                self.begin_push(worker)


Bounded.TestCase.settings = Backups.TestCase.settings = TwoServers.TestCase.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, derandomize=True
)
TestBounded = Bounded.TestCase
TestBackups = Backups.TestCase
TestTwoServers = TwoServers.TestCase


def test_nobody_waits_where_clocks_are_free():
    clocks = FreeClocks()
    for worker in range(2):
        clocks.join(worker)
    for _ in range(100):
        clocks.tick(0)
        assert clocks.may_read(0)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_fast_worker_is_stopped_exactly_at_the_bound(staleness):
    clocks = BoundedClocks(staleness)
    for worker in range(2):
        clocks.join(worker)
    for _ in range(staleness):
        clocks.tick(0)
        assert clocks.may_read(0)
    clocks.tick(0)
    assert not clocks.may_read(0)
    clocks.tick(1)
    assert clocks.may_read(0)


def test_who_comes_back_is_where_the_slowest_is():
    clocks = BoundedClocks(2)
    for worker in range(3):
        clocks.join(worker)
    clocks.leave(2)
    for _ in range(5):
        clocks.tick(0)
        clocks.tick(1)
    clocks.tick(0)
    assert clocks.join(2, 0) == 5
    for worker in range(3):
        clocks.leave(worker)
    assert clocks.join(2, 5) == 6, "when all have left, nobody's lead is lost"


def test_a_step_with_backups_takes_the_first_and_knows_the_late():
    quorum = Quorum(1)
    for worker in range(3):
        quorum.join(worker)
    quorum.tick(0)
    assert not quorum.is_complete
    quorum.tick(2)
    assert quorum.is_complete
    quorum.advance()
    assert quorum.is_late(1)
    quorum.tick(1)
    assert not quorum.arrived
    quorum.read(1)
    assert quorum.clocks[1] == 1
