"""Starts of workers, and builds of what they train: how long they take in this run, and which take far too long."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.elastic.facts import host_of

Stage: TypeAlias = Literal["start", "build"]
"""Time from the start of a process to its first beat, and time in which it builds: it waits for nobody, and has made no
step among the workers that it belongs to."""

_FACTOR = 4
"""Factor of the longest stage of this run after which one takes too long, and by which people are told less often."""
_ELSEWHERE_FACTOR = 5
"""Factor of all times on a machine from which no stage is known, or of builds before any is known."""
_TELL_S, _TELL_FIRST_S = 20.0, 45.0
"""Least times of a stage after which people are told of it, with and without one that others have ended."""


@dataclass
class Begun:
    """Stage that a worker is in."""

    stage: Stage
    since_s: float
    tell_s: float = 0.0
    """Time in the stage after which people are told again; 0 before the first time."""


class StartWatch:
    """Stages of workers, and the longest of those that ended well, by machine and stage.

    Args:
        least_s: Time that each stage may take, whatever others took.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self.begun: dict[str, Begun] = {}
        """Stage of each worker that is in one."""
        self._longest_s: dict[tuple[str, Stage], float] = {}
        self._given_up_s: dict[tuple[str, Stage], float] = {}
        """Longest time after which one was given up, by machine and stage."""

    def enter(self, name: str, stage: Stage | None, now_s: float) -> None:
        """Take note of the stage that a worker is in now; None if it is in none."""
        before = self.begun.get(name)
        if before is not None and before.stage != stage:
            key = host_of(name), before.stage
            self._longest_s[key] = max(self._longest_s.get(key, 0.0), now_s - before.since_s)
            if stage is None:  # it built too fast to be seen, if it had to
                self._longest_s.setdefault((key[0], "build"), 0.0)
            del self.begun[name]
        if stage is not None and name not in self.begun:
            self.begun[name] = Begun(stage, now_s)

    def begin_again(self, now_s: float) -> None:
        """Let all stages begin now: nobody could see how long they took."""
        for begun in self.begun.values():
            begun.since_s = now_s

    def give_up(self, name: str, now_s: float) -> None:
        """Let later ones have twice the time of a worker that is given up: its machine may need it."""
        begun = self.begun.pop(name)
        self._given_up_s[host_of(name), begun.stage] = now_s - begun.since_s

    def find_longest(self, stage: Stage) -> float | None:
        """Return the longest time that a stage took; None before the first one ended."""
        return max((took_s for (_, one), took_s in self._longest_s.items() if one == stage), default=None)

    def find_limit(self, name: str) -> float | None:
        """Return the longest time that the present stage of a worker may take; None for any."""
        key = host_of(name), self.begun[name].stage
        given_up_s = 2 * self._given_up_s.get(key, 0.0)
        if key in self._longest_s:
            return max(self._least_s, _FACTOR * self._longest_s[key], given_up_s)
        longest_s = self.find_longest(key[1])
        return None if longest_s is None else max(_ELSEWHERE_FACTOR * max(self._least_s, longest_s), given_up_s)

    def find_untold(self, now_s: float) -> Iterator[str]:
        """Yield workers whose stage takes so long that people are to be told, in time for what may follow."""
        for name, begun in self.begun.items():
            longest_s = self.find_longest(begun.stage)
            if longest_s is not None:
                tell_s = max(min(_TELL_S, 0.75 * self._least_s), 2 * longest_s)
            elif begun.stage == "start":
                tell_s = min(_TELL_FIRST_S, 0.75 * self._least_s)
            else:
                tell_s = _ELSEWHERE_FACTOR * self._least_s
            if now_s - begun.since_s >= max(tell_s, begun.tell_s):
                yield name

    def note_told(self, name: str, now_s: float) -> None:
        """Take note that people were told of a worker."""
        begun = self.begun[name]
        begun.tell_s = _FACTOR * (now_s - begun.since_s)

    def describe(self, name: str, now_s: float) -> str:
        """Return what a worker does in its stage, in words."""
        begun = self.begun[name]
        took_s = now_s - begun.since_s
        if begun.stage == "start":
            return f"has not begun {took_s:.0f} s after it was started (phase starting)"
        return f"has been building for {took_s:.0f} s (phase building), and has made no step yet"
