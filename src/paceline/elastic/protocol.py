"""Membership protocol: which workers train together in which epoch, as a state machine.

It has no processes, sockets, files or clock: facts go in (`Fact`), and what is to be done about them comes out
(`Action`). One coordinator decides, so that two views of an epoch cannot exist. It is a function of the facts that it
was told, in their order: whoever writes them down before acting on the answers (`Journal`) can make it again.

An epoch ends when a worker of it dies or reports that it lost its peers, or when all are asked to stop at a step
boundary, because workers join or leave. Each worker then says how many updates its state has, and whether it is whole
(`Voted`). Once all that live have, the most advanced whole state wins: its worker is rank 0 of the next epoch, and
sends it to the others. Messages of an epoch count in that epoch only. Who stands still is killed, and so is no longer
waited for.

Other machines may offer workers, whose names end in ``@`` and the machine's. Rank 0 writes the run's log and
checkpoints: where only a worker elsewhere has the most advanced state, it leads one epoch, at whose first boundary a
worker of the coordinator's own machine takes over.
"""

from dataclasses import dataclass

from paceline.elastic.facts import (
    Action,
    AllEnded,
    Announce,
    AskForBoundary,
    Died,
    Fact,
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
    View,
    Voted,
    Withdrawn,
    host_of,
)


@dataclass(frozen=True)
class MembershipSettings:
    """MembershipSettings of a coordinator."""

    target: int
    """Number of workers wanted; it may be changed (`Scaled`)."""
    min_workers: int | None = None
    """Number of workers of an epoch that must be left to go on without a restart; None for half of them."""
    num_spares: int = 0
    """Number of workers beyond the target that are kept ready."""
    max_restarts: int = 3
    """Number of failures in a row, without progress, that are borne."""
    first_epoch: int = 0
    """Number of the first epoch."""


@dataclass
class Worker:
    """What the coordinator knows of a living process."""

    slot: int
    is_ready: bool = False
    is_leaving: bool = False
    """Whether the worker leaves at the next boundary."""
    within_s: float | None = None
    """Time that it was given to leave; None for any."""
    is_doomed: bool = False
    """Whether the worker is being killed; nothing that it says counts any more."""
    is_evicted: bool = False
    """Whether the worker is unwanted: it ends by itself, since a view without it was announced, or is killed."""
    vote: Voted | None = None
    """Vote of the worker in the present epoch."""


class Coordinator:
    """Decides who trains together; see the module.

    Args:
        settings: MembershipSettings of the run.
    """

    def __init__(self, settings: MembershipSettings) -> None:
        self.settings = settings
        self.target = settings.target
        self.epoch = settings.first_epoch - 1
        """Number of the newest epoch."""
        self.view: View | None = None
        """The newest view, as rank 0 sees it; None before the first of a start of all workers."""
        self.workers: dict[str, Worker] = {}
        """Living processes by name, in the order of their start."""
        self.places: dict[str, int] = {}
        """Number of workers that each other machine offers; 0 if its workers are leaving."""
        self.obstacle = ""
        """Reason why workers of this run cannot go on in another group; empty if they can."""
        self.fixed = ""
        """Reason why there must always be as many workers, each in its place: a lost one's is its replacement's."""
        self.is_restarting = False
        """Whether all processes are being ended."""
        self.is_over = False
        """Whether nothing more will be done."""
        self._last: GiveUp | Finished | None = None
        """The last action, which says how the run ended."""
        self.is_stopping = False
        """Whether all workers were asked to stop: nobody is started or taken in but for a part of the model."""
        self._is_ending = False
        """Whether a worker has done its work, so that the others are about to."""
        self._is_asked = False
        """Whether the epoch's workers were asked to stop at a boundary."""
        self._lost: dict[str, str] = {}
        """Ways in which workers of the present epoch were lost, by name."""
        self._furthest = -1
        self._num_failures = 0
        """Number of failures since the run has got further."""
        self._num_stillborn = 0
        """Number of workers that ended before they were taken in, since one was."""
        self._num_started: dict[tuple[str, int], int] = {}

    @property
    def members(self) -> list[str]:
        """Names of the workers of the present epoch that live and are not being killed, by rank."""
        names = self.view.names if self.view else ()
        return [name for name in names if name in self.workers and not self.workers[name].is_doomed]

    def counts(self, name: str) -> bool:
        """Return whether the end of a worker now would be a loss: it takes part, or all wait for it."""
        if self.view is not None:
            return name in self.members
        return name in self.workers and not (self.workers[name].is_doomed or self.workers[name].is_evicted)

    @property
    def is_broken(self) -> bool:
        """Whether the present epoch cannot go on: a worker was lost, or has lost others."""
        return bool(self._lost) or any(vote.lost for vote in self._list_votes())

    @property
    def is_asked(self) -> bool:
        """Whether the present epoch's workers were asked to stop at a boundary."""
        return self._is_asked

    def begin(self) -> list[Action]:
        """Return the first actions."""
        return self._advance()

    def handle(self, fact: Fact) -> list[Action]:
        """Take note of a fact, and return what is to be done."""
        if self.is_over:
            return []
        actions: list[Action] = []
        worker = self.workers.get(getattr(fact, "name", ""))
        match fact:
            case AllEnded() if self.is_restarting:
                actions = self._note_all_ended(fact)
            case Died() if worker:
                actions = self._note_death(fact, worker)
            case Silent() if worker and not worker.is_doomed:
                actions = [Kill(fact.name, fact.reason)]
                if fact.name in self.members:
                    self._lost[fact.name] = fact.reason
                worker.is_doomed = True
            case Ready() if worker:
                worker.is_ready = True
                self.obstacle = self.obstacle or fact.obstacle
                self.fixed = self.fixed or fact.fixed
            case Voted() if worker and fact.epoch == self.epoch and fact.name in self.members:
                worker.vote = worker.vote or fact
            case LeaveAsked() if worker:
                worker.is_leaving, worker.within_s = True, fact.within_s
                actions = self._dismiss([fact.name] if fact.name in self._list_idle() else [], "it was asked to leave")
            case Scaled():
                self.target, self._num_stillborn = fact.target, 0
            case Offered() if fact.host not in self.places:
                self.places[fact.host] = fact.num_workers
                self.target, self._num_stillborn = self.target + fact.num_workers, 0
            case Withdrawn() if self.places.get(fact.host):
                actions = self._withdraw(fact.host)
            case HostLost() if fact.host in self.places:
                actions = self._lose_host(fact)
            case StopAsked():
                self.is_stopping = True
        return actions + self._advance()

    def list_outstanding(self) -> list[Action]:
        """Return the actions that may not have been done, of a coordinator that was made again; all may be repeated."""
        if self.is_over:
            return [self._last] if self._last else []
        if self.is_restarting:
            return [RestartAll("the launcher was lost while it ended the workers")]
        actions: list[Action] = [
            Kill(name, "it stood still") if worker.is_doomed else StartWorker(name, worker.slot)
            for name, worker in self.workers.items()
        ]
        if self.view:
            actions.append(Announce(self.view))
        if self._is_asked:
            actions.append(AskForBoundary(self.epoch))
        return actions

    def _list_votes(self) -> list[Voted]:
        votes = (self.workers[name].vote for name in self.members)
        return [vote for vote in votes if vote]

    def _list_joiners(self) -> list[str]:
        """Return the names of workers that may be taken in."""
        taken = self.view.names if self.view else ()
        return [
            name
            for name, worker in self.workers.items()
            if worker.is_ready
            and name not in taken
            and not (worker.is_evicted or worker.is_doomed or worker.is_leaving)
        ]

    def _note_death(self, fact: Died, worker: Worker) -> list[Action]:
        is_counted = fact.name in self.members or (self.view is None and not worker.is_evicted)
        del self.workers[fact.name]
        if self.is_restarting:
            return []
        if self.view is None and worker.is_doomed and not worker.is_evicted:  # it stood still, and is replaced alone
            return self._restart(fact.reason) if self._count_failure(self._furthest) else []
        if not is_counted:  # a spare or a replacement, or one that has left or was killed
            self._num_stillborn += fact.name not in (self.view.names if self.view else ()) and not worker.is_evicted
            return []
        if fact.end == "done":
            self._is_ending = True
            return self._dismiss(self._list_idle(), "the run has ended")
        self._lost[fact.name] = fact.reason
        is_final = fact.end in ("gave_up", "failed") or self._is_ending or self.view is None or bool(self.obstacle)
        return self._restart(fact.reason) if is_final else []

    def _withdraw(self, host: str) -> list[Action]:
        """Let the workers of a machine leave, and want as many fewer."""
        num_places, self.places[host] = self.places[host], 0
        staying = [name for name, one in self.workers.items() if host_of(name) == host and not one.is_evicted]
        self.target = max(1, self.target - min(num_places, sum(not self.workers[n].is_doomed for n in staying)))
        for name in staying:
            self.workers[name].is_leaving = True
        return self._dismiss([name for name in self._list_idle() if name in staying], "its machine is withdrawn")

    def _lose_host(self, fact: HostLost) -> list[Action]:
        """Count all workers of a machine as dead."""
        if self.places[fact.host]:
            self._withdraw(fact.host)
        del self.places[fact.host]
        actions: list[Action] = []
        for name in [name for name in self.workers if host_of(name) == fact.host]:
            # The machine is gone: that says nothing of workers that others start.
            self.workers[name].is_evicted |= self.view is not None and name not in self.members
            actions += self._note_death(Died(name, "killed", fact.reason), self.workers[name])
        return actions

    def _list_idle(self) -> list[str]:
        """Return the names of workers that take no part, and are not about to end."""
        taken = self.members
        return [n for n, one in self.workers.items() if n not in taken and not (one.is_doomed or one.is_evicted)]

    def _dismiss(self, names: list[str], reason: str) -> list[Action]:
        for name in names:
            self.workers[name].is_doomed = self.workers[name].is_evicted = True
        return [Kill(name, reason) for name in names]

    def _restart(self, reason: str) -> list[Action]:
        self.is_restarting = True
        return [RestartAll(reason)]

    def _note_all_ended(self, fact: AllEnded) -> list[Action]:
        if self.view is None:
            self.epoch += 1  # what its workers logged counts as an epoch
        self.workers, self.view, self.is_restarting, self._is_ending = {}, None, False, False
        self._num_stillborn = 0  # restarts have a limit of their own
        self._begin_epoch()
        if self._count_failure(fact.step) or self.is_stopping:
            return self._end(
                GiveUp(f"gave up after {self.settings.max_restarts} restarts without progress: {fact.reason}")
            )
        return []

    def _end(self, action: GiveUp | Finished) -> list[Action]:
        self.is_over, self._last = True, action
        return [action]

    def _begin_epoch(self) -> None:
        self._lost, self._is_asked = {}, False
        for worker in self.workers.values():
            worker.vote = None

    def _count_failure(self, step: int) -> bool:
        """Count a failure at a step, and return whether there were too many without progress."""
        self._num_failures = self._num_failures + 1 if step <= self._furthest else 1
        self._furthest = max(self._furthest, step)
        return self._num_failures > self.settings.max_restarts

    def _advance(self) -> list[Action]:
        """Return what follows from the present state."""
        if self.is_over or self.is_restarting:
            return []
        if not self.workers and (self._is_ending or self.is_stopping):
            return self._end(Finished())
        actions: list[Action] = []
        joiners = self._list_joiners()
        if self.view is None:
            if len(joiners) >= self.target:
                here_first = sorted(joiners[: self.target], key=lambda name: bool(host_of(name)))
                actions = self._announce(here_first, -1, "all workers are here")
        elif self.is_broken or self._is_asked or self._have_stopped():
            if len(self._list_votes()) == len(self.members) and (self.members or not self._is_ending):
                actions = self._close_epoch(joiners)
        elif self._wants_change(joiners):
            self._is_asked = True
            actions = [AskForBoundary(self.epoch)]
        return actions if self.is_restarting else actions + self._start_missing()

    def _have_stopped(self) -> bool:
        """Return whether all workers wait at a boundary, asked or not: nobody else could let them go on."""
        return bool(self.members) and len(self._list_votes()) == len(self.members)

    def _wants_change(self, joiners: list[str]) -> bool:
        if self.is_stopping or self._is_ending or self.obstacle or self.fixed:
            return False
        num_leaving = sum(self.workers[name].is_leaving for name in self.members)
        can_leave = bool(joiners) or num_leaving < len(self.members)
        size = len(self.members)
        if self._is_led_from_elsewhere():
            return True
        return size > self.target or bool(joiners and size < self.target) or bool(num_leaving and can_leave)

    def _is_led_from_elsewhere(self) -> bool:
        """Return whether rank 0 is on another machine, though a worker of this one could take its place."""
        here = [name for name in self.members if not (host_of(name) or self.workers[name].is_leaving)]
        return bool(here) and bool(host_of(self.members[0]))

    def _close_epoch(self, joiners: list[str]) -> list[Action]:
        """End the epoch, whose workers have all voted."""
        assert self.view is not None
        votes = self._list_votes()
        reason = "; ".join(dict.fromkeys(self._lost.values()) or self._list_reports())
        min_workers = self.settings.min_workers or -(-len(self.view.names) // 2)
        if self.fixed and len(self.members) + len(joiners) < len(self.view.names) and not self._is_ending:
            is_hopeless = self._num_stillborn > self.settings.max_restarts
            can_wait = len(votes) >= min_workers and any(vote.is_whole for vote in votes) and not is_hopeless
            return [] if can_wait else self._restart(reason)
        if self.is_broken:
            most = max([vote.step for vote in votes if vote.is_whole], default=-1)
            if self._is_ending or len(votes) < min_workers or most < 0 or self._count_failure(most):
                return self._restart(reason)
        best = max(vote.step for vote in votes if vote.is_whole)
        if self.fixed:
            return self._announce(self._fill_places(joiners), best, reason)
        first = min(
            (vote.name for vote in votes if vote.is_whole and vote.step == best),
            # of those that stay, here if there is one, the one of the lowest rank
            key=lambda name: (self.workers[name].is_leaving, bool(host_of(name))),
        )
        staying = [name for name in self.members if name != first and not self.workers[name].is_leaving]
        size = self.target + self.workers[first].is_leaving  # it gives its state to others first
        names = [first, *staying][:size]
        names += joiners[: size - len(names)] if not self.is_stopping else []
        return self._announce(names, best, reason)

    def _list_reports(self) -> list[str]:
        """Return what those who voted say of their loss, each sentence once, after the names of all who say it."""
        names: dict[str, list[str]] = {}
        for vote in self._list_votes():
            if vote.lost:
                names.setdefault(vote.lost, []).append(vote.name)
        return [f"{', '.join(those)}: {sentence}" for sentence, those in names.items()]

    def _fill_places(self, joiners: list[str]) -> list[str]:
        """Return the names of the next epoch: new workers in the places of lost ones, the others where they were."""
        assert self.view is not None
        members, new = self.members, list(joiners)
        return [name if name in members else new.pop(0) for name in self.view.names]

    def _announce(self, names: list[str], step: int, reason: str) -> list[Action]:
        """Begin the next epoch with these workers."""
        before = self.members
        old = self.view.names if self.view else ()
        changes = [reason] if reason else []
        changes += [f"{name} joined" for name in names if name not in old and self.view]
        changes += [f"{name} left" for name in before if name not in names]
        for name in set(before) - set(names):
            self.workers[name].is_evicted = True
        self._begin_epoch()
        if set(names) - set(old):
            self._num_stillborn = 0
        self.epoch += 1
        previous = tuple(old.index(name) if name in old else None for name in names)
        self.view = View(self.epoch, 0, len(names), tuple(names), previous, step, "; ".join(changes))
        return [Announce(self.view)]

    def _start_missing(self) -> list[Action]:
        """Start as many workers as are missing, or end those that nobody needs."""
        # Where each has a part of the model, what is left can be saved once all parts are there again.
        can_start = not self.is_stopping or (bool(self.fixed) and self.view is not None and self.is_broken)
        if not can_start or self._is_ending or (self.obstacle and self.view is not None):
            return []
        if self._num_stillborn > self.settings.max_restarts:
            return []
        alive = [one for one in self.workers.values() if not (one.is_doomed or one.is_evicted or one.is_leaving)]
        wanted = self.target + (self.settings.num_spares if self.view and not self.is_stopping else 0)
        num_surplus = len(alive) - wanted
        actions = self._dismiss(self._list_idle()[-num_surplus:], "it is not needed") if num_surplus > 0 else []
        for _ in range(-num_surplus):
            host, slot = self._find_place()
            self._num_started[host, slot] = number = self._num_started.get((host, slot), 0) + 1
            name = (f"w{slot}" if number == 1 else f"w{slot}.{number}") + (f"@{host}" if host else "")
            self.workers[name] = Worker(slot)
            actions.append(StartWorker(name, slot))
        return actions

    def _find_place(self) -> tuple[str, int]:
        """Return the lowest free place, on another machine if one has any."""
        for host in (*self.places, ""):
            alive = [name for name, worker in self.workers.items() if not worker.is_doomed]
            taken = {self.workers[name].slot for name in alive if host_of(name) == host}
            slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            if not host or slot < self.places[host]:
                return host, slot
        raise AssertionError("this machine always has a place")
