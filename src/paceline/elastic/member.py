"""A worker's connection to the coordinator of its run, over a store that the coordinator's process holds.

A worker says how it is in one document, `Status`, which it writes again whenever that changes and each quarter of a
second: what is lost or doubled on the way does no harm. Views lie in the store by epoch.
"""

import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from threading import Event, RLock
from typing import Any, Literal, TypeVar

import torch
from torch.distributed import PrefixStore, Store

from paceline.comm.control import ControlError, store_of_epoch
from paceline.comm.group import Group, note_joined
from paceline.comm.hang_watch import UNJUDGED
from paceline.comm.join import Transport, open_group
from paceline.comm.local_group import LocalGroup
from paceline.comm.progress import PROGRESS, Position
from paceline.comm.reach import UnreachableError, describe_all
from paceline.comm.threads import start_thread
from paceline.elastic.facts import View
from paceline.errors import CommunicationError, PacelineError

T = TypeVar("T")
BEAT_INTERVAL_S = 0.25
POLL_S = 0.005


class Evicted(PacelineError):  # noqa: N818 - it is no error: the worker has done its part
    """This worker is no longer one of those that train: the run was made smaller, or it was asked to leave."""


class Lateness:
    """Time by which a thread that sleeps now and then woke up late of late; what is long ago counts less and less."""

    late_s: float = 0.0

    def note(self, late_s: float) -> None:
        """Take in one more time; it is halved with each seventh one."""
        self.late_s = max(late_s, 0.9 * self.late_s)


class Member(ABC):
    """A worker's connection to the coordinator."""

    @abstractmethod
    def report_loss(self, step: int, *, is_whole: bool, reason: str, accused: tuple[str, ...] = ()) -> None:
        """Say that this worker lost its peers; then call `next_view`.

        Args:
            step: Number of updates of this worker's state.
            is_whole: Whether its state is that after `step` updates, and not broken off in the middle of another.
            reason: Error by which it noticed, in words.
            accused: Workers that hang by its verdict: they are killed unless they have said the same of others.
        """

    @abstractmethod
    def next_view(self, timeout_s: float) -> View:
        """Wait for the next epoch with this worker.

        Args:
            timeout_s: Longest time for which the supervisor may not answer.

        Raises:
            CommunicationError: There will be none: a restart follows.
            Evicted: The epoch is without this worker, which must end.
        """

    can_leave: bool = False
    """Whether this worker may leave by itself, and the others go on."""

    def leave(self) -> None:
        """Ask to leave at a step boundary, where it `can_leave`."""
        raise NotImplementedError

    @abstractmethod
    def change_is_pending(self) -> bool:
        """Return whether workers join or leave at the next step boundary; it costs nothing."""

    def call_when_broken(self, epoch: int, call: Callable[[], None]) -> None:
        """Call a function, in another thread, once a worker of an epoch is known to be lost; by default never."""

    def is_broken(self, epoch: int, within_s: float) -> bool:
        """Return whether a worker of an epoch is known to be lost, or is so within a time; by default none is."""
        return False

    @abstractmethod
    def at_boundary(self, step: int) -> None:
        """Say that this worker has stopped after `step` updates, as all of its epoch have; then call `next_view`."""

    @abstractmethod
    def open_group(self, view: View, device: torch.device, timeout_s: float, transport: Transport) -> Group:
        """Return the group of the workers of a view, and make it that of new replicas and loaders.

        Raises:
            CommunicationError: Some of them did not come.
        """


@dataclass(frozen=True)
class Status:
    """State of a worker, as the coordinator sees it."""

    beat: int = 0
    """Number of times that it was written."""
    epoch: int = -1
    phase: Literal["starting", "ready", "opening", "training", "lost", "boundary"] = "starting"
    step: int = -1
    is_whole: bool = True
    reason: str = ""
    """Way in which the worker lost its peers."""
    accused: tuple[str, ...] = ()
    """Workers that hang by its verdict."""
    unreachable: tuple[tuple[str, str], ...] = ()
    """Names of the workers of each connection that could not be opened in this epoch: who tried, and whom."""
    obstacle: str = ""
    """Reason why it could not go on in another group."""
    fixed: str = ""
    """Reason why there must always be as many workers."""
    is_leaving: bool = False
    """Whether the worker asks to leave."""
    still_s: float = 0.0
    """Time since its training loop entered the present phase."""
    late_s: float = 0.0
    """Time by which beats came late of late: the machine is starved, or calls keep the interpreter locked."""
    place: str = ""
    """Phase and step that it is in, in words; empty before the first."""
    step_phase: str = ""
    """Phase of the step that it is in; empty before the first."""
    connecting: str = ""
    """Workers with which it opens connections, in words; empty if it opens none."""
    waits: bool = False
    """Whether the worker waits for others in an operation."""
    is_building: bool = False
    """Whether the worker builds what it trains, or has made no step yet among the workers that it belongs to."""


class StoreMember(Member):
    """Connection of a worker over stores.

    Args:
        connect: Function that opens a connection to the store. It is called twice: a group that waits for others must
            not hold up what this worker says.
        name: Name of the worker.
        obstacle: Reason why workers of this run cannot go on in another group; empty if they can.
        fixed: Reason why there must always be as many workers; empty if there may be others.
        connect_group: Function that opens the connection for groups; by default `connect`.
        is_abandoned: Function that says whether the launcher is gone, and nobody took its place in time.
        absence_s: Time for which the launcher may be gone.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        name: str,
        *,
        obstacle: str = "",
        fixed: str = "",
        connect_group: Callable[[], Store] | None = None,
        is_abandoned: Callable[[], bool] = lambda: False,
        absence_s: float = 0.0,
    ) -> None:
        self.name = name
        self._store: Store = PrefixStore("control", connect())
        self._group_store = (connect_group or connect)()
        self._is_abandoned, self._absence_s = is_abandoned, absence_s
        self._status = Status(obstacle=obstacle, fixed=fixed)
        self._changing = -1
        """Epoch of the last announced change; a number, since a beat may still tell of the one before."""
        self._on_broken: dict[int, Callable[[], None]] = {}
        """Function to call when an epoch is found broken, by epoch."""
        self._is_leaving, self.can_leave = False, not (obstacle or fixed)
        self._joined = (-1, 0.0)
        """Step of the training loop when this worker joined its epoch, and the time of that."""
        self._names: tuple[str, ...] = ()
        """Workers of the epoch that this one has entered last, by rank."""
        self._unreachable: tuple[tuple[str, str], ...] = ()
        """Workers of connections that could not be opened in that epoch."""
        self._lock = RLock()
        self._closed = Event()
        self._lateness = Lateness()
        self._say()
        self._thread = start_thread(self._keep_beating, name="paceline-member", stop=self._closed.set)

    def report_loss(self, step: int, *, is_whole: bool, reason: str, accused: tuple[str, ...] = ()) -> None:
        """Write it down."""
        unreachable = self._unreachable
        self._say(phase="lost", step=step, is_whole=is_whole, reason=reason, accused=accused, unreachable=unreachable)

    def at_boundary(self, step: int) -> None:
        """Write it down."""
        self._say(phase="boundary", step=step, is_whole=True, reason="", accused=())

    def leave(self) -> None:
        """Ask to leave at a step boundary. It may be called in a signal handler."""
        self._is_leaving = True  # the next beat says it

    def next_view(self, timeout_s: float) -> View:
        """Look for it again and again, for as long as the launcher's store answers, or another one may come."""
        if self._status.epoch < 0:
            self._say(phase="ready")
        answered_s = time.monotonic()
        while True:
            try:
                view = self._look_for_view()
                answered_s = time.monotonic()
            except RuntimeError as error:
                if self._is_abandoned() or time.monotonic() - answered_s > max(timeout_s, self._absence_s):
                    raise CommunicationError(f"the launcher of worker {self.name} does not answer: {error}") from error
                view = None
            if view is not None:
                return view
            time.sleep(POLL_S)

    def _look_for_view(self) -> View | None:
        document = self._read("view")
        if document is not None and document["epoch"] > self._status.epoch:
            if self.name in document["names"]:
                return self._enter(document)
            if self._status.epoch >= 0:
                raise Evicted(f"worker {self.name} is not in epoch {document['epoch']}: {document['reason']}")
        over = self._read("over")
        if over is not None and over["epoch"] >= self._status.epoch:
            raise CommunicationError(over["reason"])
        return None

    def change_is_pending(self) -> bool:
        """Return what the last beat found."""
        return self._changing == self._status.epoch

    def open_group(self, view: View, device: torch.device, timeout_s: float, transport: Transport) -> Group:
        """Open it once all are there; who waits for others there is told at once if one of them is lost."""
        with PROGRESS.connecting([rank for rank in range(view.size) if rank != view.rank]):
            self._await_entries(view, timeout_s)
        try:
            group = self._open(view, device, timeout_s, transport)
        except UnreachableError as error:
            self._unreachable = tuple((view.names[one.rank], view.names[one.other]) for one in error.obstructions)
            raise CommunicationError(describe_all(error.obstructions, view.names)) from error
        except RuntimeError as error:
            raise CommunicationError(f"worker {self.name} could not join epoch {view.epoch}: {error}") from error
        note_joined(group)
        self._joined = (PROGRESS.read().step, time.monotonic())
        self._say(phase="training", step=view.step)
        return group

    def _await_entries(self, view: View, timeout_s: float) -> None:
        """Wait until all workers of a view have entered it."""
        self._insist(lambda: self._store.set(f"entered/{view.epoch}/{view.rank}", ""))
        keys = [f"entered/{view.epoch}/{rank}" for rank in range(view.size)]
        deadline_s = time.monotonic() + timeout_s
        while not self._insist(lambda: self._store.check(keys)):
            change = self._insist(lambda: self._read("change"))
            if change is not None and change["epoch"] == view.epoch and change["is_broken"]:
                raise CommunicationError(f"a worker of epoch {view.epoch} was lost before all had come")
            if time.monotonic() > deadline_s:
                late = [view.names[rank] for rank, key in enumerate(keys) if not self._store.check([key])]
                raise CommunicationError(f"workers {', '.join(late)} must enter epoch {view.epoch}, but did not")
            time.sleep(POLL_S)

    def _insist(self, ask: Callable[[], T]) -> T:
        """Return what the store answers; while it does not, another launcher may come and hold it."""
        began_s = time.monotonic()
        while True:
            try:
                return ask()
            except ControlError:
                if self._is_abandoned() or time.monotonic() - began_s > self._absence_s:
                    raise

    def _open(self, view: View, device: torch.device, timeout_s: float, transport: Transport) -> Group:
        if view.size == 1:
            return LocalGroup(device=device, epoch=view.epoch)
        return open_group(
            store_of_epoch(self._group_store, view.epoch),
            view.rank,
            view.size,
            device=device,
            timeout_s=timeout_s,
            epoch=view.epoch,
            transport=transport,
        )

    def close(self) -> None:
        """Say nothing more."""
        self._closed.set()
        self._thread.join(timeout=2.0)

    def _enter(self, document: dict[str, Any]) -> View:
        names, previous = document.pop("names"), document.pop("previous")
        self._names, self._unreachable = tuple(names), ()
        view = View(**document | {"rank": names.index(self.name)}, names=tuple(names), previous=tuple(previous))
        self._say(
            phase="opening", epoch=view.epoch, step=view.step, is_whole=True, reason="", accused=(), unreachable=()
        )
        return view

    def _read(self, key: str) -> dict[str, Any] | None:
        with self._lock:
            if not self._store.check([key]):
                return None
            document: dict[str, Any] = json.loads(self._store.get(key))
            return document

    def _say(self, **changes: object) -> None:
        with self._lock:
            before = self._status
            now = replace(before, beat=before.beat + 1, is_leaving=self._is_leaving, **changes)  # type: ignore[arg-type]
            self._status = now
            position = PROGRESS.read()
            place = f"is in phase {position.phase} of step {position.step}" if position.phase else ""
            still_s, late_s, waits = time.monotonic() - position.since_s, self._lateness.late_s, bool(PROGRESS.waits)
            said = replace(now, still_s=still_s, late_s=late_s, place=place, step_phase=position.phase, waits=waits)
            said = replace(said, is_building=self._is_building(position), connecting=self._describe_connecting())
            with contextlib.suppress(ControlError):  # the next beat says it
                self._store.set(f"status/{self.name}", json.dumps(asdict(said)))
                if replace(now, beat=before.beat) != before or now.beat == 1:
                    self._store.add("mail", 1)

    def _describe_connecting(self) -> str:
        return ", ".join(self._names[rank] for rank in PROGRESS.connects_to if rank < len(self._names))

    def _is_building(self, position: Position) -> bool:
        if self._status.phase != "training":
            return self._status.phase == "starting"
        step, joined_s = self._joined
        may_last = position.phase in UNJUDGED and position.since_s > joined_s  # else it is that of an epoch before
        return position.step == step and not may_last

    def call_when_broken(self, epoch: int, call: Callable[[], None]) -> None:
        """Note the function; an older epoch's is forgotten."""
        self._on_broken = {epoch: call}

    def is_broken(self, epoch: int, within_s: float) -> bool:
        """Look for it again and again."""
        deadline_s = time.monotonic() + within_s
        while True:
            change = self._insist(lambda: self._read("change"))
            if change is not None and change["epoch"] == epoch and change["is_broken"]:
                return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)

    def _look_for_change(self) -> None:
        if (change := self._read("change")) is not None:
            self._changing = change["epoch"]
            if change["is_broken"] and (call := self._on_broken.pop(change["epoch"], None)) is not None:
                start_thread(call, name="paceline-break-off")

    def _keep_beating(self) -> None:
        began_s = time.monotonic()
        while not self._closed.wait(BEAT_INTERVAL_S):
            self._lateness.note(time.monotonic() - began_s - BEAT_INTERVAL_S)
            began_s = time.monotonic()
            try:
                self._say()
                self._look_for_change()
            except ControlError:  # another launcher may come
                continue
            except RuntimeError:
                return
