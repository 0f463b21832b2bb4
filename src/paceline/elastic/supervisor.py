"""The process that starts workers, holds their store, and decides by the membership protocol who trains together."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import starmap

from torch.distributed import PrefixStore, Store

from paceline.comm.control.store import find_control_store
from paceline.elastic.facts import (
    Action,
    AllEnded,
    Announce,
    AskForBoundary,
    Died,
    End,
    Fact,
    Finished,
    GiveUp,
    HostLost,
    Kill,
    LeaveAsked,
    Ready,
    RestartAll,
    Silent,
    StartWorker,
    StopAsked,
    Voted,
    host_of,
)
from paceline.elastic.journal import Journal
from paceline.elastic.member import Status
from paceline.elastic.protocol import Coordinator
from paceline.elastic.unreachable import find_unreachable
from paceline.elastic.watch import BUSY_S, IDLE_S, Patience, Watch

_LOOK_S = 0.5
"""Longest time between two looks at beats."""


class Workforce(ABC):
    """The worker processes of a supervisor."""

    @abstractmethod
    def start(self, name: str, slot: int, epoch: int) -> None:
        """Start a process, unless one of this name is known. What it logs before it is taken in belongs to `epoch`."""

    @abstractmethod
    def kill(self, name: str) -> None:
        """End a process at once, if it has not ended."""

    @abstractmethod
    def wait(self, timeout_s: float) -> list[tuple[str, End, str]]:
        """Wait until a process has ended; return the names of those that have, and how, also in words."""

    def forget(self, name: str) -> None:
        """Forget a process that has ended, since that was written down."""

    def drop_host(self, host: str, reason: str) -> list[Fact]:
        """Want nothing more of another machine, and return what follows; a reason says why, to people there too."""
        return []

    def locate(self, name: str) -> str:
        """Return process and line of code of a worker in words; empty if they cannot be seen from here."""
        return ""

    def read_news(self) -> list[str]:
        """Return, in words, what else people are to know of the processes, since the last call."""
        return []

    @abstractmethod
    def end_all(self) -> None:
        """Ask all processes to end, and return once they have."""


@dataclass(frozen=True)
class EndVerdict:
    """What the log says of how all processes ended."""

    is_final: bool
    """Whether nothing needs to be started again."""
    step: int
    reason: str


class Supervisor:
    """Runs workers until they have finished, or cannot be helped.

    Args:
        coordinator: Coordinator, at its beginning, or made again from its journal.
        store: Store that the workers connect to.
        workforce: Processes of the workers.
        journal: Journal of the coordinator.
        judge: Function that says what the end of all processes means; it is given the epoch of their log.
        tell_restart: Function that is told the epoch and the reason of each restart from the checkpoint.
        tell_standstill: Function that is told, in words, where workers are that have all stood still for long, who has
            not begun, and what else people are to know of their processes.
        read_requests: Function that returns what people have asked for since it was called last.
        ask_to_stop: Function that asks all workers to stop with a checkpoint.
        check_place: Function that raises an error where another supervisor has taken this one's place.
        notice_s: Time for a worker that asks to leave by itself; None for any time.
        patience: Times for which workers may stand still.
        clock: Clock of seconds.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: Store,
        workforce: Workforce,
        journal: Journal,
        *,
        judge: Callable[[int], EndVerdict],
        tell_restart: Callable[[int, str], None],
        tell_standstill: Callable[[str], None] = lambda _: None,
        read_requests: Callable[[Coordinator], list[Fact]] = lambda _: [],
        ask_to_stop: Callable[[], None] = lambda: None,
        check_place: Callable[[], None] = lambda: None,
        notice_s: float | None = None,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.coordinator = coordinator
        self._store = PrefixStore("control", store)
        self._control = find_control_store(store)
        self._workforce = workforce
        self._journal = journal
        self._ask_to_stop, self._notice_s = ask_to_stop, notice_s
        self._judge, self._tell_restart, self._read_requests = judge, tell_restart, read_requests
        self._check_place, self._clock = check_place, clock
        self._tell = tell_standstill
        self._watch = Watch(
            coordinator, lambda name: workforce.locate(name), tell_standstill, patience or Patience(), clock
        )
        self._num_mails = 0
        self._known_hosts = set[str]()
        """Machines whose workers have made steps with those of others."""
        self._cut_links = set[frozenset[str]]()
        """Pairs of machines whose workers could not connect in the last epoch, since which there was no step."""
        self._judged_epoch = -1
        """Epoch of the last connections that could not be opened, which all its workers tell of."""
        self._broken_s: float | None = None
        """Time at which the present epoch was found broken."""
        self._leave_by: dict[str, tuple[float, float]] = {}
        """Time by which each worker must have left, and half-way to it."""
        self._looked_s = clock()
        self.gave_up = ""
        """Reason why nothing is started any more; empty if the workers have finished, or a verdict is final."""
        self.has_verdict = False
        """Whether a verdict was final."""
        self.killed: dict[str, str] = {}
        """Ways in which workers of the present epoch were killed, by name; others may have given up for them."""
        self._ended: list[Died] = []
        """Ends of workers that the coordinator is still to be told."""
        self.is_stopping = False
        """Whether this process was asked to stop; it may be set in a signal handler."""
        self._stop_asked_s: float | None = None
        """Time at which the coordinator was told that all are to stop."""
        self.killed_at_stop: dict[str, str] = {}
        """Reasons why workers were killed after all were asked to stop, by name."""

    def run(self, *, takes_over: bool = False) -> None:
        """Run until nothing is left to do.

        Args:
            takes_over: Whether to go on for a supervisor that was lost, from whose journal the coordinator was made.
        """
        if takes_over:
            self._take_over()
        else:
            self._do(self.coordinator.begin())
        while not self.coordinator.is_over:
            self._check_place()
            is_busy = self._broken_s is not None or self.coordinator.is_asked or self.coordinator.view is None
            began_s, wait_s = self._clock(), BUSY_S if is_busy else IDLE_S
            self._ended += starmap(Died, self._workforce.wait(wait_s))
            self._watch.lateness.note(self._clock() - began_s - wait_s)
            for words in self._workforce.read_news():
                self._tell(words)
            while self._ended:
                self._feed(self._ended.pop(0))
            if self.is_stopping and self._stop_asked_s is None:
                self._feed(StopAsked())
            for fact in self._read_requests(self.coordinator):
                self._feed(fact)
            self._read_mail()
            for silent in self._watch.find_silent(self._broken_s):
                self._feed(silent)
            if self._stop_asked_s is not None:
                for silent in self._watch.find_unstopped(self._stop_asked_s):
                    self._feed(silent)
            self._watch_leavers()

    def _take_over(self) -> None:
        """Do again what may not have been done, and let times for leaving and stopping begin anew."""
        coordinator, now_s = self.coordinator, self._clock()
        self._known_hosts |= set(coordinator.places)
        for name, worker in coordinator.workers.items():
            self._watch.begin(name)
            if worker.is_leaving and worker.within_s is not None:
                self._leave_by[name] = (now_s + worker.within_s, now_s + worker.within_s / 2)
        if coordinator.is_stopping:
            self.is_stopping, self._stop_asked_s = True, now_s
            self._ask_to_stop()
        self._do(coordinator.list_outstanding())
        if coordinator.view is not None and coordinator.is_broken:
            self._broken_s = now_s
            self._announce_change(is_broken=True)
        elif coordinator.view is not None:
            self._feed(Ready(coordinator.view.names[0]))  # somebody may be about to leave

    def _feed(self, fact: Fact) -> None:
        if self.coordinator.is_over:
            return
        self._check_place()
        self._journal.append(fact)
        if isinstance(fact, Died):
            self._watch.forget(fact.name)
            self._workforce.forget(fact.name)
        self._note_killed(fact)
        if isinstance(fact, StopAsked):
            self._stop_asked_s = self._clock()
        if isinstance(fact, Silent) and self._stop_asked_s is not None:
            self.killed_at_stop[fact.name] = fact.reason
        if isinstance(fact, LeaveAsked) and fact.within_s is not None:
            now_s = self._clock()
            self._leave_by.setdefault(fact.name, (now_s + fact.within_s, now_s + fact.within_s / 2))
        epoch, members = self.coordinator.epoch, self.coordinator.members
        actions = self.coordinator.handle(fact)
        if (
            isinstance(fact, Silent)
            and not self.is_stopping
            and not (fact.name in members and self._watch.has_made_step(fact.name))
        ):  # no event may ever say that it was lost
            started = ", ".join(action.name for action in actions if isinstance(action, StartWorker))
            self._tell(f"{fact.reason}; it is killed{started and f', and {started} is started in its place'}")
        if self.coordinator.epoch != epoch:
            self._broken_s, self.killed = None, {}
        elif self.coordinator.is_broken and self._broken_s is None:
            self._broken_s = self._clock()
            self._announce_change(is_broken=True)
        self._do(actions)
        if view := next((action.view for action in actions if isinstance(action, Announce)), None):
            # Where somebody is still to leave, nobody may say anything more that makes the coordinator look again.
            self._feed(Ready(view.names[0]))

    def _note_killed(self, fact: Fact) -> None:
        """Remember the workers of the epoch that a fact says were killed."""
        match fact:
            case HostLost(host=host):
                names = [name for name in self.coordinator.workers if host_of(name) == host]
            case Died(name=name, end="killed") | Silent(name=name):
                names = [name]
            case _:
                return
        self.killed |= {name: fact.reason for name in names if self.coordinator.counts(name)}

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartWorker(name=name, slot=slot):
                    self._workforce.start(name, slot, self.coordinator.epoch + 1)
                    self._watch.begin(name)
                case Kill(name=name):
                    self._workforce.kill(name)
                case Announce(view=view):
                    if self._control is not None:
                        self._control.announce_epoch(view.epoch)
                    self._store.set("view", json.dumps(asdict(view)))
                case AskForBoundary():
                    self._announce_change(is_broken=False)
                case RestartAll(reason=reason):
                    self._restart(reason)
                case GiveUp(reason=reason):
                    self.gave_up = reason
                case Finished():
                    pass

    def _announce_change(self, *, is_broken: bool) -> None:
        self._store.set("change", json.dumps({"epoch": self.coordinator.epoch, "is_broken": is_broken}))
        if is_broken and self._control is not None:
            self._control.break_epoch(self.coordinator.epoch)

    def _restart(self, reason: str) -> None:
        """End all workers, and start them again unless it would be in vain."""
        coordinator = self.coordinator
        self._store.set("over", json.dumps({"epoch": coordinator.epoch, "reason": reason}))
        for died in (*self._ended, *starmap(Died, self._workforce.wait(0.0))):
            self._note_killed(died)
        self._workforce.end_all()
        self._watch.forget_all()
        self._broken_s = None
        verdict = self._judge(coordinator.epoch if coordinator.view else coordinator.epoch + 1)
        self._ended, self.killed = [], {}
        if verdict.is_final:
            coordinator.is_over = self.has_verdict = True
            return
        self._store.delete_key("over")
        fact = AllEnded(verdict.step, verdict.reason)
        self._journal.append(fact)
        actions = coordinator.handle(fact)
        if not coordinator.is_over:
            self._tell_restart(coordinator.epoch + 1, verdict.reason)
        self._do(actions)

    def _read_mail(self) -> None:
        """Read what workers say, if one of them says something new, or it is time to look for their beats."""
        now_s = self._clock()
        num_mails = self._store.add("mail", 0)
        is_time = now_s - self._looked_s >= (_LOOK_S if self._broken_s is None else BUSY_S)
        if num_mails == self._num_mails and not is_time:
            return
        if now_s - self._looked_s > 2 * _LOOK_S:  # this process itself stood still
            self._watch.bear_silence(now_s)
        self._num_mails, self._looked_s = num_mails, now_s
        for name in list(self.coordinator.workers):
            if self._store.check([f"status/{name}"]):
                status = Status(**json.loads(self._store.get(f"status/{name}")))
                if self._watch.note(name, status, now_s):
                    self._take(name, status)

    def _take(self, name: str, status: Status) -> None:
        """Tell the coordinator what a worker says, if that is new."""
        worker = self.coordinator.workers.get(name)
        if worker is None:
            return
        if status.phase == "ready" and not worker.is_ready:
            self._feed(Ready(name, status.obstacle, status.fixed))
        if status.is_leaving and not worker.is_leaving:
            self._feed(LeaveAsked(name, self._notice_s))
        if status.phase in ("lost", "boundary") and status.epoch == self.coordinator.epoch and worker.vote is None:
            lost = (status.reason or "it lost its peers") if status.phase == "lost" else ""
            view = self.coordinator.view
            if view is not None and status.step > max(view.step, 0):
                self._known_hosts |= {host_of(member) for member in view.names}
                self._cut_links = set()
            self._feed(Voted(name, status.epoch, status.step, status.is_whole, lost, tuple(status.accused)))
            if status.unreachable and status.epoch != self._judged_epoch:
                self._judged_epoch = status.epoch
                self._drop_unreachable([(one, other) for one, other in status.unreachable], lost)

    def _drop_unreachable(self, pairs: list[tuple[str, str]], reason: str) -> None:
        """Go on without machines that others cannot connect to: those that have just joined, others the second time."""
        links = {frozenset(map(host_of, pair)) for pair in pairs}
        is_again, self._cut_links = bool(links & self._cut_links), links
        hosts = find_unreachable(pairs, self._known_hosts) or (find_unreachable(pairs, ()) if is_again else [])
        if not hosts:
            self._tell(f"{reason}; connections to all ports of these machines must be let through")
        for host in hosts:
            words = f"{host} is dropped: {reason}; let connections to all ports through, then start its agent again"
            self._tell(words)
            for fact in self._workforce.drop_host(host, words):
                self._feed(fact)

    def _watch_leavers(self) -> None:
        """End workers whose time to leave is over; where no other one has the state, let it be saved in time."""
        now_s, coordinator = self._clock(), self.coordinator
        for name, (end_s, half_s) in list(self._leave_by.items()):
            worker = coordinator.workers.get(name)
            if worker is None or worker.is_doomed:
                del self._leave_by[name]
                continue
            others = [other for other in coordinator.members if not coordinator.workers[other].is_leaving]
            if not others and name in coordinator.members:
                if now_s > half_s and not self.is_stopping:
                    self.is_stopping = True
                    self._ask_to_stop()
            elif now_s > end_s and not self.is_stopping:
                self._feed(Silent(name, f"{name} had to leave, and reached no step boundary in time"))
