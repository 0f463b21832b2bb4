"""Which ranks hang, by their heartbeats: pure rules over what is read of them while this rank waits.

A rank hangs if it is stopped, if it posts no heartbeats (its threads do not run: Python's lock is held, or its host is
cut off), or if it posts them, waits for nobody, and its training loop has not moved for much longer than ever before.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.comm.heartbeat_record import Heartbeat
from paceline.comm.progress import Position, read_position
from paceline.comm.stacks import ask_for_line, find_host_of_processes, is_stopped, started_at
from paceline.errors import CommunicationError, PeerTimeoutError

STOPPED_S = 1.0
"""Time for which a process of this host must be stopped to count as hanging."""
SILENT_S = 5.0
"""Least time without heartbeats after which a rank hangs."""
STILL_S = 20.0
"""Least time without progress after which a rank hangs whose heartbeats go on."""
STILL_DATA_S = 60.0
"""The same while it waits for data, whose source may be far away."""
_SILENT_FACTOR, _STILL_FACTOR = 3, 10
_LEAST_STEPS = 2
UNJUDGED = ("", "loop", "save", "evaluate")
"""Phases that may last as long as they like, unless a time was given."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong with ranks that others wait for."""

    words: str
    """Each of them, with the reason."""
    is_gone: bool
    """Whether the ranks have ended, rather than hang."""
    hung_ranks: tuple[int, ...] = ()
    """Ranks that hang."""

    def to_error(self, where: str) -> CommunicationError:
        """Return the error of the operation `where` this rank waited."""
        if self.is_gone:
            return CommunicationError(f"{where} lost its peers: {self.words}")
        error = PeerTimeoutError(f"{where} must not wait for ranks that hang, but {self.words}; they are given up")
        error.hung_ranks = self.hung_ranks
        return error


class HangWatch:
    """Judges ranks by their heartbeats, looked at again and again while this rank waits.

    Args:
        timeout_s: Time without progress or heartbeats after which a rank hangs; None for what its own past suggests.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, timeout_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._beats: dict[int, tuple[int, float]] = {}
        self._stopped_since_s: dict[int, float] = {}
        self._here = find_host_of_processes()

    def judge(self, heartbeats: Mapping[int, Heartbeat | None], waiting: int = 0) -> Verdict | None:
        """Return the verdict on the other ranks, by their numbers in errors; None while nobody is known to hang.

        Args:
            heartbeats: Latest heartbeat of each.
            waiting: Number of the operation that this rank waits in; 0 if who ended is none of its business.
        """
        known = {rank: heartbeat for rank, heartbeat in heartbeats.items() if heartbeat is not None}
        gone = {rank: words for rank, one in known.items() if (words := self._find_end(one, waiting))}
        if gone:
            causes_first = sorted(gone, key=lambda rank: known[rank].has_lost_peers)
            return Verdict(_join({rank: gone[rank] for rank in causes_first}, known), is_gone=True)
        hung = {rank: words for rank, one in known.items() if (words := self._find_hang(rank, one))}
        for rank, words in hung.items():
            hung[rank] = words + self._ask(known[rank])
        return Verdict(_join(hung, known), is_gone=False, hung_ranks=tuple(hung)) if hung else None

    def _find_end(self, one: Heartbeat, waiting: int) -> str:
        """Return how a rank has ended, if it has, and this one needs it."""
        if not waiting:
            return ""
        if one.last_words:
            return f"stopped: {one.last_words}" if one.begun < waiting or one.has_failed else ""
        if self._is_visible(one) and started_at(one.pid) != one.started:
            return f"is dead: its last heartbeat came after it had begun {one.describe_begun()}"
        return ""

    def _find_hang(self, rank: int, one: Heartbeat) -> str:
        """Return why a rank counts as hanging; empty if it does not."""
        now_s = self._clock()
        beat, since_s = self._beats.get(rank, (-1, now_s))
        if beat != one.beat:
            beat, since_s = one.beat, now_s
        self._beats[rank] = beat, since_s
        if one.last_words:
            return ""
        if self._is_visible(one) and is_stopped(one.pid):
            stopped_s = now_s - self._stopped_since_s.setdefault(rank, now_s)
            if stopped_s >= STOPPED_S:
                return f"is stopped, as by SIGSTOP, {self._describe_place(one)}"
        else:
            self._stopped_since_s.pop(rank, None)
        silent_s, limit_s = now_s - since_s, max(SILENT_S, _SILENT_FACTOR * one.longest_silence_s)
        still_s, still_limit_s = one.still_s + silent_s, self.find_limit(one)
        is_still = still_limit_s is not None and not one.waits and still_s >= still_limit_s
        limit_s = limit_s if self._timeout_s is None else min(self._timeout_s, limit_s)
        if silent_s >= (limit_s / 2 if is_still else limit_s):
            return (
                f"has posted no heartbeat for {silent_s:.0f} s {self._describe_place(one)}: Python's lock is held, the "
                "process is frozen, or its host is cut off"
            )
        if is_still:
            longest = f" (its longest phase took {one.longest_s:.1f} s)" if one.longest_s else ""
            return f"lives, but has made no progress for {still_s:.0f} s {self._describe_place(one)}{longest}"
        return ""

    def find_limit(self, one: Heartbeat) -> float | None:
        """Return the longest time in which a rank may stand still; None for any."""
        if one.num_steps < _LEAST_STEPS:
            return None
        if self._timeout_s is not None:
            return self._timeout_s
        if one.phase in UNJUDGED:
            return None
        return max(STILL_DATA_S if one.phase == "data" else STILL_S, _STILL_FACTOR * one.longest_s)

    def _is_visible(self, one: Heartbeat) -> bool:
        """Return whether a rank's process can be seen from here."""
        return bool(self._here) and one.host_key == self._here

    def _read_place(self, one: Heartbeat) -> Position:
        """Return step and phase of a rank: of this moment if its process is visible, else as posted last."""
        posted = Position(one.step, one.phase, 0.0)
        if self._is_visible(one) and started_at(one.pid) == one.started:
            return read_position(one.progress) or posted
        return posted

    def _describe_place(self, one: Heartbeat) -> str:
        place = self._read_place(one)
        return f"in phase {place.phase} of step {place.step}" if place.step >= 0 else "before its first step"

    def _ask(self, one: Heartbeat) -> str:
        """Return where a hanging rank is, in words that follow a sentence."""
        line = one.line
        if self._is_visible(one) and started_at(one.pid) == one.started and not is_stopped(one.pid):
            line = ask_for_line(one.pid, one.stacks, is_reading=self._read_place(one).phase == "data") or line
        file = "" if one.stacks.startswith("/proc/") else f"; the stacks of its threads are in {one.stacks}"
        return f"; it is at {line}{file}" if line else ""


def _join(words: Mapping[int, str], known: Mapping[int, Heartbeat]) -> str:
    return "; ".join(
        f"rank {rank} (host {known[rank].host}, pid {known[rank].pid}) {said}" for rank, said in words.items()
    )
