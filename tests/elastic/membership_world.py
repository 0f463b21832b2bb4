"""A world for the membership protocol, without processes: its workers, what they say, and what is lost of it.

An update is a token, a worker's state the tokens of its updates: that none is lost or doubled can be read off.
"""

import itertools
from dataclasses import dataclass

from paceline.elastic.facts import (
    AllEnded,
    Announce,
    AskForBoundary,
    Died,
    Finished,
    GiveUp,
    HostLost,
    Kill,
    Ready,
    RestartAll,
    Silent,
    StartWorker,
    Voted,
    host_of,
)
from paceline.elastic.protocol import Coordinator

NUM_STEPS = 8


@dataclass
class Process:
    name: str
    slot: int
    epoch: int = -1
    phase: str = "ready"
    """ready, opening, training, lost or boundary."""
    updates: tuple = ()
    is_whole: bool = True
    is_frozen: bool = False


class CoordinatorLostError(Exception):
    """The coordinator crashed in the middle of what it did."""


class World:
    def __init__(self, settings, coordinator=Coordinator):
        self.coordinator_class, self.settings = coordinator, settings
        self.journal, self.local, self.network = [], [], []
        self.processes, self.ever_started, self.views = {}, set(), {}
        self.asked, self.checkpoint, self.committed, self.furthest = -1, (), (), -1
        self.end = None
        self.crash_after = None
        """Number of effects after which the coordinator crashes, or the action before which it does; None for never."""
        self.left = set()
        self.coordinator = coordinator(settings)
        self._do(self.coordinator.begin)

    # What the coordinator's process does.

    def feed(self, fact):
        if self.coordinator is not None:
            self._do(lambda: self._handle(fact))

    def _handle(self, fact):
        self._effect()
        if isinstance(fact, HostLost):  # who still lives there is ended
            self._end_host(fact.host)
        self.journal.append(fact)
        return self.coordinator.handle(fact)

    def _do(self, decide):
        try:
            for action in decide():
                self._effect(action)
                self._act(action)
        except CoordinatorLostError:
            self.coordinator, self.local = None, []

    def _effect(self, action=None):
        if isinstance(self.crash_after, type):
            if isinstance(action, self.crash_after):
                self.crash_after = None
                raise CoordinatorLostError
        elif self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after < 0:
                self.crash_after = None
                raise CoordinatorLostError

    def recover(self):
        """Make the coordinator again, from its journal, and tell it who has died meanwhile."""
        if self.coordinator is not None:
            return
        self.coordinator = self.coordinator_class(self.settings)
        self.coordinator.begin()
        for fact in self.journal:
            self.coordinator.handle(fact)
        known = list(self.coordinator.workers)
        self.local = []
        self._do(self.coordinator.list_outstanding)
        if self.coordinator is not None:
            self.local += [Died(name, "killed", f"{name} is gone") for name in known if name not in self.processes]

    def _act(self, action):
        match action:
            case StartWorker(name=name, slot=slot):
                if name not in self.ever_started:
                    self.ever_started.add(name)
                    alive = [p for p in self.processes.values() if not self._is_doomed(p.name)]
                    assert slot not in {p.slot for p in alive if host_of(p.name) == host_of(name)}
                    assert not host_of(name) or slot < self.coordinator.places[host_of(name)]
                    self.processes[name] = Process(name, slot)
                    self.say(name)
            case Kill(name=name, reason=reason):
                assert name not in self.left or reason.endswith(" still"), "who was left out ends by itself"
                self.die(name, "killed")
            case Announce(view=view):
                if view.epoch not in self.views:
                    self._check_view(view)
                assert self.views.setdefault(view.epoch, view) == view, "an epoch must have one view"
            case AskForBoundary(epoch=epoch):
                self.asked = epoch
            case RestartAll():
                self.processes.clear()
                self.network = []  # of another store
                self.committed = self.checkpoint
                self.local = [AllEnded(self.furthest, "lost")]
            case GiveUp() | Finished():
                self.end = action

    def _is_doomed(self, name):
        worker = self.coordinator.workers.get(name)
        return worker is None or worker.is_doomed

    def _check_view(self, view):
        assert view.epoch == self.coordinator.epoch
        assert len(set(view.names)) == view.size == len(view.previous) >= 1
        assert view.size <= self.coordinator.target + 1
        before = self.views.get(view.epoch - 1)
        assert not any(self._is_doomed(name) for name in view.names)
        assert not self.left & set(view.names), "who has left does not come back"
        self.left |= set(before.names) - set(view.names) if before else set()
        for name, rank in zip(view.names, view.previous, strict=True):
            if view.step < 0:
                assert rank is None
            else:
                assert (before.names[rank] == name) if rank is not None else (name not in before.names)
            assert view.step >= 0 or not host_of(view.names[0]) or all(map(host_of, view.names))
        if view.step >= 0:
            voters = [p for p in self.processes.values() if p.name in before.names and not self._is_doomed(p.name)]
            assert all(p.phase in ("lost", "boundary") for p in voters), "a worker of the epoch before goes on in it"
            best = max((len(p.updates) for p in voters if p.is_whole), default=0)
            assert best <= view.step, "the most advanced whole update must win"

    # What workers do.

    def say(self, name):
        """Send what a worker says now, as it does again and again."""
        process = self.processes[name]
        if process.is_frozen:
            return
        if process.phase == "ready":
            self.network.append(Ready(name))
        elif process.phase in ("lost", "boundary"):
            lost = "lost its peers" if process.phase == "lost" else ""
            self.network.append(Voted(name, process.epoch, len(process.updates), process.is_whole, lost))

    def die(self, name, end):
        if self.processes.pop(name, None) is not None and self.coordinator is not None:
            self.local.append(Died(name, end, f"{name} died"))

    def lose_host(self, host):
        """Let a machine die with its workers."""
        self._end_host(host)
        if self.coordinator is not None:
            self.local.append(HostLost(host, f"{host} no longer answers"))

    def _end_host(self, host):
        for name in [name for name in self.processes if host_of(name) == host]:
            del self.processes[name]

    def live(self, epoch):
        """Return the workers of a view that are in its epoch, and all of them if all are."""
        names = self.views[epoch].names if epoch in self.views else ()
        return [self.processes[n] for n in names if n in self.processes and self.processes[n].epoch == epoch]

    def list_complete(self, phase):
        """Return the epochs all of whose workers are there, in a phase."""
        return [
            epoch
            for epoch, view in self.views.items()
            if len(live := self.live(epoch)) == view.size and all(p.phase == phase and not p.is_frozen for p in live)
        ]

    def step(self, epoch, victim=None, done=()):
        """Take an update in an epoch; if a victim dies in it, only some have `done` it, and others are torn."""
        workers = self.live(epoch)
        token = (len(workers[0].updates), epoch)
        for number, worker in enumerate(workers):
            if victim is None or number in done:
                worker.updates += (token,)
            elif number % 2:
                worker.updates, worker.is_whole = (*worker.updates, token), False
        if victim is None:
            self.committed = workers[0].updates
        self.furthest = max(self.furthest, token[0] + 1) if victim is None else self.furthest
        if victim is not None:
            self.die(workers[victim % len(workers)].name, "killed")
        elif len(workers[0].updates) >= NUM_STEPS:
            for worker in workers:
                self.die(worker.name, "done")

    def enter(self, epoch, victim=None):
        """Give all workers of a view rank 0's state; if a victim dies in it, those of odd rank have half of it."""
        view, workers = self.views[epoch], self.live(epoch)
        state = workers[0].updates
        if view.step < 0:
            state = self.checkpoint
        else:
            assert workers[0].is_whole
            assert len(state) == view.step
            assert state[: len(self.committed)] == self.committed, "an update is lost"
        assert [token[0] for token in state] == list(range(len(state))), "an update is lost or doubled"
        for number, worker in enumerate(workers):
            worker.phase = "training"
            if number and victim is not None and number % 2 and worker.updates != state:
                worker.is_whole = False
            else:
                worker.updates, worker.is_whole = state, True
        if victim is not None:
            self.die(workers[victim % len(workers)].name, "killed")

    def look(self, name):
        """Let a worker that waits look for a newer view."""
        process = self.processes[name]
        newest = max(self.views, default=-1)
        if process.is_frozen or process.phase in ("opening", "training") or newest <= process.epoch:
            return
        if name in self.views[newest].names:
            process.epoch, process.phase = newest, "opening"
        elif process.epoch >= 0:
            self.die(name, "done" if process.phase == "boundary" else "killed")

    def notice(self, name, *, wrongly=False):
        """Let a worker notice that others of its epoch are gone, or believe it."""
        process = self.processes[name]
        if process.is_frozen or process.phase not in ("opening", "training"):
            return
        view = self.views[process.epoch]
        live = self.live(process.epoch)
        if process.phase == "training":
            is_gone = len(live) < view.size
        else:
            is_gone = any(n not in self.processes or self.processes[n].epoch > process.epoch for n in view.names)
        if wrongly or is_gone or any(p.is_frozen or p.phase in ("lost", "boundary") for p in live):
            if process.phase == "opening":
                if view.step < 0:
                    process.updates = self.checkpoint
                elif view.previous[view.names.index(name)] is None:
                    process.is_whole = view.step == 0
            process.phase = "lost"
            self.say(name)

    def stop_at_boundary(self):
        if self.asked in self.list_complete("training"):
            for worker in self.live(self.asked):
                worker.phase = "boundary"
                self.say(worker.name)

    def save(self):
        for epoch in self.list_complete("training"):
            if epoch == max(self.views):
                self.checkpoint = self.live(epoch)[0].updates

    def check(self):
        """Workers of one epoch have the same updates, but for the last one."""
        for epoch in self.views:
            states = sorted((p.updates for p in self.live(epoch) if p.phase == "training" and p.is_whole), key=len)
            for shorter, longer in itertools.pairwise(states):
                assert longer[: len(shorter)] == shorter, "workers of one epoch must not differ"
        training = [epoch for epoch in self.list_complete("training") if epoch < max(self.views)]
        assert not training, "an old epoch must not go on"

    # What is expected once faults have ended.

    def run_without_faults(self):
        """Let everything happen that can: all places are taken, and then the run ends."""
        self.crash_after = None
        self._run_until(lambda: self._is_full(), NUM_STEPS - 1)
        self._run_until(lambda: False, NUM_STEPS)

    def _run_until(self, is_reached, last_step):
        for _ in range(100):
            self.recover()
            if self.end is not None or is_reached():
                return
            self._do_everything(last_step)
            self.check()
        found = {name: value for name, value in vars(self).items() if name != "journal"}
        raise AssertionError(f"it must get on once faults end: {found}, {vars(self.coordinator)}")

    def _is_full(self):
        newest, coordinator = max(self.views, default=-1), self.coordinator
        names = self.views[newest].names if newest in self.list_complete("training") else ()
        return (
            len(names) == coordinator.target
            and (not host_of(names[0]) or all(map(host_of, names)))
            and not any(coordinator.workers[name].is_leaving for name in names if name in coordinator.workers)
            and len(self.processes) == coordinator.target + self.settings.num_spares
        )

    def _do_everything(self, last_step=NUM_STEPS, *, hears_of_deaths=True):
        for process in list(self.processes.values()):
            if process.is_frozen:
                self.feed(Silent(process.name, "it stands still"))
        while self.local and self.coordinator is not None and hears_of_deaths:
            self.feed(self.local.pop(0))
        for name in list(self.processes):
            self.say(name)
        network, self.network = self.network, []
        for fact in network:
            self.feed(fact)
        for name in list(self.processes):
            self.look(name)
        for name in list(self.processes):
            self.notice(name)
        for epoch in self.list_complete("opening"):
            self.enter(epoch)
        self.stop_at_boundary()
        for epoch in self.list_complete("training"):
            if last_step == NUM_STEPS or len(self.live(epoch)[0].updates) < last_step:
                self.step(epoch)
