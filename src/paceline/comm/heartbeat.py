"""Heartbeats: where each rank is, posted out of band, so that a time-out can name who is missing.

Each rank posts its heartbeat (which operation it has begun, which it waits in) to a store every quarter of a second
from a thread of its own; nothing is posted on the path of an operation. When one fails, everybody's posts are read
twice: a rank whose posts have stopped is dead or frozen, the others say where they are.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store

from paceline.comm.control import ControlError
from paceline.comm.hang_watch import UNJUDGED, HangWatch, Verdict
from paceline.comm.heartbeat_record import FINISHED, MESSAGE, Heartbeat
from paceline.comm.progress import PROGRESS
from paceline.comm.stacks import find_host_of_processes, find_own_line, register_stacks, started_at
from paceline.comm.store_watch import STORE_WATCH
from paceline.comm.threads import start_thread
from paceline.errors import PeerTimeoutError

POST_INTERVAL_S = 0.25
_NUM_RECENT = 16
_STORE_TIMEOUT_S = 2.0
_NUM_LOOKS = 4
"""Number of looks at ranks, while the posts of several stand still."""
_WATCH_AFTER_S = 1.0
"""Time of waiting in an operation after which a rank begins to watch the others."""


T = TypeVar("T")


class HeartbeatBoard:
    """Posts this rank's heartbeat and reads those of all ranks.

    Args:
        store: Store for the heartbeats.
        rank: Rank of this process.
        names: Number of each rank in errors.
        on_verdict: Function that ends this rank's operations, called in a thread of its own when ranks that it waits
            for have ended or hang; None to watch nobody.
    """

    def __init__(
        self, store: Store, rank: int, names: Sequence[int], on_verdict: Callable[[Verdict], None] | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._names = names
        self._on_verdict = on_verdict
        self.num_looks = 0
        """Number of posts and looks at the others that have ended: if it stands still, the store does not answer."""
        self.waiting_outside = 0
        """Number of an operation of a group above this one, which has no watch of its own, while it is waited in."""
        self._mine = Heartbeat(
            socket.gethostname(),
            os.getpid(),
            host_key=find_host_of_processes(),
            started=started_at(os.getpid()),
            progress=PROGRESS.path,
            stacks=register_stacks(),
        )
        self._watched = 0, 0, 0.0
        self._watched_since_s = self._posted_s = time.monotonic()
        self._watch: HangWatch | None = None
        self._first_step = -1
        self._recent: deque[tuple[int, str]] = deque(maxlen=_NUM_RECENT)
        self._waiting_since_s = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._post()
        self._thread = start_thread(self._keep_posting, name="paceline-heartbeat", stop=self._closed.set)
        if on_verdict is not None:
            STORE_WATCH.add(self)

    def begin(self, sequence: int, name: str, what: str = "") -> None:
        """Record that an operation has begun: its number, its name, and what it does."""
        self._mine.begun = sequence
        self._mine.begun_name = name
        self._recent.append((sequence, f"{name!r} ({what})" if what else repr(name)))

    def wait_in(self, sequence: int) -> None:
        """Record the operation that this rank waits in, or `MESSAGE`; 0 when it no longer waits."""
        self._waiting_since_s = time.monotonic()
        self._mine.waiting = sequence
        PROGRESS.wait_in(id(self), sequence)

    @property
    def latest(self) -> Heartbeat:
        """This rank's own heartbeat, as posted last."""
        return self._mine

    def close(self, last_words: str = "") -> None:
        """Post for the last time; the `last_words` of the first call count."""
        PROGRESS.wait_in(id(self), 0)
        self._closed.set()
        self._thread.join(timeout=_STORE_TIMEOUT_S)
        if not self._mine.last_words and not self._thread.is_alive():
            self._mine.last_words = last_words or FINISHED
            run_within(_STORE_TIMEOUT_S, self._post)

    def read(self, rank: int) -> Heartbeat | None:
        """Return a rank's latest heartbeat; None if it has posted none or the store does not answer."""
        return run_within(_STORE_TIMEOUT_S, lambda: self._read_one(f"heartbeat/{rank}"))

    def describe_others(self, sequence: int) -> str:
        """Return a description of where each other rank is, those that hold up operation `sequence` first."""
        found = self._look_around()
        if found is None:
            return "the store does not answer: the process that holds it (that of rank 0) is gone or frozen"
        return describe_ranks(found, sequence)

    def _look_around(self) -> dict[int, tuple[Heartbeat | None, Heartbeat | None]] | None:
        """Return an earlier and a later heartbeat of each other rank, by its number in errors; None without a store.

        While several stand still, it looks again: on a busy machine some of them are only slow.
        """
        found: dict[int, tuple[Heartbeat | None, Heartbeat | None]] = {}
        before = run_within(_STORE_TIMEOUT_S, self._read)
        if before is not None and (seen := self._see_processes(before)):
            return seen
        for _ in range(_NUM_LOOKS):
            time.sleep(3 * POST_INTERVAL_S)
            after = run_within(_STORE_TIMEOUT_S, self._read) if before is not None else None
            if before is None or after is None:
                return None
            pairs = zip(self._names, before, after, strict=True)
            found = {name: (earlier, later) for name, earlier, later in pairs if name != self._names[self._rank]}
            if sum(_stands_still(*pair) for pair in found.values()) <= 1:
                break
        return found

    def _see_processes(
        self, heartbeats: Sequence[Heartbeat | None]
    ) -> dict[int, tuple[Heartbeat | None, Heartbeat | None]]:
        """Return the heartbeats of those that have ended, if a process of this host has without saying so."""
        dead = {place for place, one in enumerate(heartbeats) if place != self._rank and self._is_dead(one)}
        # Who was alive at the first look may have posted its last words and left since: what stands now is final.
        heartbeats = (run_within(_STORE_TIMEOUT_S, self._read) if dead else None) or []
        seen: dict[int, tuple[Heartbeat | None, Heartbeat | None]] = {}
        for place, (name, one) in enumerate(zip(self._names, heartbeats, strict=False)):
            if one is None or place == self._rank:
                continue
            if place in dead or one.last_words:  # what the others posted last may be a quarter of a second old
                seen[name] = one, replace(one, beat=one.beat + int(place not in dead))
        return seen if any(_stands_still(*pair) for pair in seen.values()) else {}

    def _is_dead(self, one: Heartbeat | None) -> bool:
        """Return whether the process of a heartbeat is of this host and has ended."""
        here = self._mine.host_key
        return bool(here) and one is not None and one.host_key == here and started_at(one.pid) != one.started

    def find_mismatch(self) -> str:
        """Return the first of the last operations that ranks ran differently, as a sentence; empty if there is none."""
        read = run_within(_STORE_TIMEOUT_S, self._read) or []
        recent = {name: dict(heartbeat.recent) for name, heartbeat in zip(self._names, read, strict=False) if heartbeat}
        return describe_mismatch({**recent, self._names[self._rank]: dict(self._recent)})

    @property
    def is_open(self) -> bool:
        """Whether it still posts."""
        return not self._closed.is_set()

    def end_by(self, verdict: Verdict) -> None:
        """Hand over a verdict, if none was before."""
        told, self._on_verdict = self._on_verdict, None
        if told is not None:
            start_thread(told, verdict, name="paceline-verdict")

    def _keep_posting(self) -> None:
        while not self._closed.wait(POST_INTERVAL_S):
            is_answered = self._post()
            if self._on_verdict is not None and not self._closed.is_set():
                self._judge()
            self.num_looks += is_answered

    def _judge(self) -> None:
        """Judge the others while this rank waits, and hand over the verdict."""
        waiting = self._mine.waiting, self.waiting_outside, self._waiting_since_s  # messages have one number for all
        if (idle_since_s := PROGRESS.idle_since_s) is not None:  # whatever it asks them meanwhile
            waiting = 0, MESSAGE, idle_since_s
        is_waiting, now_s = any(waiting[:2]), time.monotonic()
        if waiting != self._watched or not is_waiting:
            self._watched, self._watched_since_s, self._watch = waiting, now_s, None
        if not is_waiting or now_s - self._watched_since_s < _WATCH_AFTER_S:
            return
        self._watch = self._watch or HangWatch(PROGRESS.hang_timeout_s)
        with contextlib.suppress(RuntimeError):  # without a store there is nobody to judge
            verdict = self._watch.judge(self._read_others(), waiting[0])
            if verdict and verdict.is_gone:  # the reason may have been posted between the read and the end
                verdict = self._watch.judge(self._read_others(), waiting[0])
            if verdict:
                self.end_by(verdict)

    def _note_progress(self) -> None:
        """Record step and phase in the heartbeat, and how long the phase before them took."""
        mine, position, now_s = self._mine, PROGRESS.read(), time.monotonic()
        has_moved = (position.step, position.phase) != (
            mine.step,
            mine.phase,
        ) or now_s - position.since_s < mine.still_s
        if has_moved:
            if mine.phase not in UNJUDGED and not mine.waits:
                mine.longest_s = max(mine.longest_s, mine.still_s)
            mine.line = ""
        mine.longest_silence_s = max(mine.longest_silence_s, now_s - self._posted_s)
        mine.step, mine.phase, mine.still_s = position.step, position.phase, now_s - position.since_s
        mine.waits, self._posted_s = bool(PROGRESS.waits) or PROGRESS.idle_since_s is not None, now_s
        if self._first_step < 0:  # there may have been many steps since the last post
            self._first_step = position.step if PROGRESS.first_step < 0 else PROGRESS.first_step
        mine.num_steps = max(0, position.step - self._first_step)
        limit_s = HangWatch(PROGRESS.hang_timeout_s).find_limit(mine)
        if limit_s is not None and not mine.line and not mine.waits and mine.still_s > limit_s / 2:
            mine.line = find_own_line(is_reading=mine.phase == "data")  # others may see no process of this host

    def _post(self) -> bool:
        """Post, and return whether the store has answered."""
        with self._lock:
            self._note_progress()
            self._mine.beat += 1
            waited_s = time.monotonic() - self._waiting_since_s if self._mine.waiting else 0.0
            self._mine.waiting_since_s = round(waited_s, 1)
            self._mine.recent = list(self._recent.copy())
            try:
                self._store.set(f"heartbeat/{self._rank}", json.dumps(asdict(self._mine)))
            except ControlError:  # another launcher may hold it soon
                return False
            except RuntimeError:
                self._closed.set()  # the store is gone; the waiting thread reports it
                return False
            return True

    def _read_others(self) -> dict[int, Heartbeat | None]:
        """Return the latest heartbeat of each other rank, by its number in errors."""
        read = zip(self._names, self._read(), strict=True)
        return {name: one for name, one in read if name != self._names[self._rank]}

    def _read(self) -> list[Heartbeat | None]:
        return [self._read_one(f"heartbeat/{rank}") for rank in range(len(self._names))]

    def _read_one(self, key: str) -> Heartbeat | None:
        if not self._store.check([key]):
            return None
        self._store.wait([key], timedelta(seconds=5))
        return Heartbeat(**json.loads(self._store.get(key)))


def run_within(timeout_s: float, function: Callable[[], T]) -> T | None:
    """Return the result of `function`, or None if it fails or takes longer: a frozen store never answers a call."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(function())

    start_thread(run, name="paceline-store").join(timeout_s)
    return results[0] if results else None


def describe_mismatch(operations: Mapping[int, Mapping[int, str]], where: str = "") -> str:
    """Return the first operation that ranks ran differently, as a sentence; empty if all that are known are the same.

    Args:
        operations: Operations of each rank, by its number in errors and theirs.
        where: Words for the group that runs them.
    """
    for number in sorted({number for known in operations.values() for number in known}):
        runs = {rank: known[number] for rank, known in sorted(operations.items()) if number in known}
        if len(set(runs.values())) > 1:
            said = ", ".join(f"rank {rank} runs {what}" for rank, what in runs.items())
            return (
                f"operation {number}{where} must be the same on every rank, but {said}; every rank must run the same "
                "operations in the same order"
            )
    return ""


def describe_ranks(heartbeats: Mapping[int, tuple[Heartbeat | None, Heartbeat | None]], sequence: int) -> str:
    """Return a description of where ranks are, those that hold up operation `sequence` first.

    Where all only lost their peers, the first is one that ran out of time, with what it said: it names the rank that it
    waited for, which may be the one that asks now.

    Args:
        heartbeats: An earlier and a later heartbeat of each rank, by its number in errors; None where there is none.
        sequence: Number of the operation.
    """
    lines = [(rank, *_describe(before, after, sequence)) for rank, (before, after) in heartbeats.items()]
    lines.sort(key=lambda line: line[1])
    gave_up = {
        rank: after for rank, (_, after) in heartbeats.items() if after and after.last_words.startswith(_TIMED_OUT)
    }
    if gave_up and lines[0][1] == _UNSUSPECTED:
        first, after = next(iter(gave_up.items()))
        said = after.last_words.removeprefix(f"{_TIMED_OUT}: ")
        lines = [line for line in lines if line[0] != first]
        lines.insert(0, (first, _UNSUSPECTED, f"(host {after.host}, pid {after.pid}) gave up: {said}"))
    return "; ".join(f"rank {rank} {text}" for rank, _, text in lines)


_TIMED_OUT = PeerTimeoutError.__name__
_UNSUSPECTED = 3
"""Urgency of a rank that is not the cause."""


def _stands_still(before: Heartbeat | None, after: Heartbeat | None) -> bool:
    """Return whether a rank that has not said why it stopped has posted nothing between two looks."""
    return before is not None and after is not None and before.beat == after.beat and not after.last_words


def _describe(before: Heartbeat | None, after: Heartbeat | None, sequence: int) -> tuple[int, str]:
    """Return (urgency, description); the lowest urgency is the likeliest cause."""
    if after is None:
        return 0, "has posted no heartbeat yet"
    place = f"(host {after.host}, pid {after.pid})"
    where = after.describe_begun()
    if after.has_lost_peers:
        return _UNSUSPECTED, f"{place} lost its peers too, in {where}"
    if after.last_words:
        return 1, f"{place} stopped after it had begun {where}: {after.last_words}"
    if _stands_still(before, after):
        return 0, f"{place} is dead or frozen: its last heartbeat came after it had begun {where}"
    if after.begun < sequence:
        what = "for a message" if after.waiting == MESSAGE else f"in operation {after.waiting}"
        doing = f"waits {what} since {after.waiting_since_s:g} s" if after.waiting else "computes"
        return 2, f"{place} is alive but behind: it has begun {where} and {doing}"
    return _UNSUSPECTED, f"{place} is alive and has begun {where}"
