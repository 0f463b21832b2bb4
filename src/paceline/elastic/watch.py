"""Signs of life of a supervisor's workers, and which of them stand still by these."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.elastic.facts import Silent
from paceline.elastic.member import BEAT_INTERVAL_S, Lateness, Status
from paceline.elastic.protocol import Coordinator
from paceline.elastic.starts import StartWatch

IDLE_S, BUSY_S = 0.05, 0.005
"""Longest times between two looks at the mail, while nothing happens and while workers change."""
_MOST_STRETCH = 10.0
"""Largest factor by which times without a beat are stretched on a starved machine."""
_START_FACTOR = 5
"""Factor of the longest standstill before the first step, where models are built and data are fetched."""


@dataclass(frozen=True)
class Patience:
    """Longest times that the supervisor waits for a worker before it kills it.

    Those without a beat are longer where this process itself, or the other workers, are late: the machine is starved.
    """

    silence_s: float = 10.0
    """Time without a beat, while other workers beat: it is stopped, or a call keeps its interpreter locked."""
    vote_s: float = 2.0
    """Time without a beat, where the others wait for its vote."""
    stuck_s: float = 300.0
    """Time without a vote, where the others wait for it, though it beats."""
    standstill_s: float = 60.0
    """Time without progress of any worker after which people are told, first, where each is; nobody is killed."""
    stop_s: float = 15.0
    """Time without progress of a worker that was asked to stop and waits for nobody, or twice its longest phase."""


class Watch:
    """Beats of workers, and judgements on those that stand still.

    Args:
        coordinator: Coordinator, which knows who takes part, and is told of the silent ones as they are found.
        locate: Function that returns process and line of code of a worker in words.
        tell_standstill: Function that is told, in words, where workers are that have all stood still for long, and who
            has not begun.
        patience: Times for which workers may stand still.
        clock: Clock of seconds.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        locate: Callable[[str], str],
        tell_standstill: Callable[[str], None],
        patience: Patience,
        clock: Callable[[], float],
    ) -> None:
        self._coordinator, self._locate, self._tell_standstill = coordinator, locate, tell_standstill
        self._patience, self._clock = patience, clock
        self._beats: dict[str, tuple[int, float]] = {}
        """Number of the last beat of each worker, and the time at which it was seen."""
        self._said: dict[str, Status] = {}
        """Newest status of each worker."""
        self._standstill_s = patience.standstill_s
        self._longest_s: dict[str, float] = {}
        """Time of the longest phase of each worker, of those that ended."""
        self._free_s: dict[str, float] = {}
        """Time since which each worker could have stopped, of those that waited for others or saved after that."""
        self._starts = StartWatch(patience.standstill_s)
        self.lateness = Lateness()
        """Lateness of the supervisor's own loop."""

    def begin(self, name: str) -> None:
        """Await the first beat of a worker that was started."""
        now_s = self._clock()
        self._beats[name] = (-1, now_s)
        if not self._coordinator.workers[name].is_ready:  # else another supervisor has seen its start
            self._starts.enter(name, "start", now_s)

    def forget(self, name: str) -> None:
        """Await no beat of a worker any more."""
        self._beats.pop(name, None)
        self._starts.begun.pop(name, None)

    def forget_all(self) -> None:
        """Await no beat of anybody any more."""
        self._beats, self._starts.begun = {}, {}

    def bear_silence(self, now_s: float) -> None:
        """Count no silence up to now, through which the supervisor itself stood still."""
        self._beats = {name: (beat, now_s) for name, (beat, _) in self._beats.items()}
        self._starts.begin_again(now_s)

    def note(self, name: str, status: Status, now_s: float) -> bool:
        """Take in what a worker says, and return whether it is new."""
        if status.beat <= self._beats.get(name, (-1, 0.0))[0]:
            return False
        if (before := self._said.get(name)) and status.still_s < before.still_s:
            self._longest_s[name] = max(self._longest_s.get(name, 0.0), before.still_s)
        self._beats[name], self._said[name] = (status.beat, now_s), status
        self._starts.enter(name, "build" if status.is_building and not status.waits else None, now_s)
        return True

    def has_made_step(self, name: str) -> bool:
        """Return whether a worker has made a step among the workers of its epoch."""
        return (said := self._said.get(name)) is not None and not said.is_building

    def find_silent(self, broken_s: float | None) -> Iterator[Silent]:
        """Yield workers that stand still; the coordinator must be told of each before the next one is looked for.

        Args:
            broken_s: Time at which the present epoch was found broken; None if it is not.
        """
        now_s, patience = self._clock(), self._patience
        silent = {name: now_s - seen_s for name, (beat, seen_s) in self._beats.items() if beat >= 0}
        newest_s = min(silent.values(), default=0.0)
        self._watch_all(silent)
        self._tell_late(now_s)
        yield from self._find_late(silent)
        for name, worker in list(self._coordinator.workers.items()):
            silent_s = silent.get(name)
            if worker.is_doomed or silent_s is None:
                continue
            stretch = self._find_stretch(name, silent)
            if silent_s > stretch * patience.silence_s and newest_s < patience.silence_s / 2:
                yield Silent(name, f"{name} stands still: no sign of life for {silent_s:.1f} s")
            elif broken_s is not None and name in self._coordinator.members and worker.vote is None:
                waited_s = now_s - broken_s
                if verdict := self._find_verdict(name):
                    yield Silent(name, f"{name} hangs: {verdict}")
                elif min(silent_s, waited_s) > stretch * patience.vote_s:
                    yield Silent(name, f"{name} stands still: no sign of life for {silent_s:.1f} s")
                elif waited_s > patience.stuck_s:
                    yield Silent(name, f"{name} did not notice within {waited_s:.0f} s that others were lost")

    def _find_late(self, silent: Mapping[str, float]) -> Iterator[Silent]:
        """Yield workers whose start takes far too long, or the building of what they train, if others wait for that.

        Where the state comes from a checkpoint, its size says how long building takes, so that nobody is judged.
        """
        now_s, starts, workers = self._clock(), self._starts, self._coordinator.workers
        late = []
        for name, begun in starts.begun.items():
            limit_s = starts.find_limit(name)
            if name in workers and not workers[name].is_doomed and limit_s is not None:
                took_s = now_s - begun.since_s
                late += [name] if took_s > limit_s * self._find_stretch(name, silent) else []
        is_live = self._coordinator.view is not None and self._coordinator.view.step >= 0
        for name in late:
            is_member = name in self._coordinator.members
            if name not in starts.begun:  # all were ended since
                continue
            if not is_member or (is_live and self._is_awaited(name, late)):
                words = f"{name} {starts.describe(name, now_s)}{self._locate(name)}"
                usual_s = starts.find_longest(starts.begun[name].stage)
                starts.give_up(name, now_s)
                yield Silent(name, f"{words}; in this run it took {usual_s:.1f} s at most")

    def _is_awaited(self, name: str, late: Sequence[str] = ()) -> bool:
        """Return whether all others of the epoch wait, but for those that are as late as this one."""
        others = [other for other in self._coordinator.members if other != name]
        return bool(others) and all(other in late or self._waits(other) for other in others)

    def _waits(self, name: str) -> bool:
        said = self._said.get(name)
        return self._has_stopped(name) or (said is not None and (said.waits or said.phase == "opening"))

    def _has_stopped(self, name: str) -> bool:
        """Return whether a worker waits for the next epoch."""
        said = self._said.get(name)
        has_voted = self._coordinator.workers[name].vote is not None
        return has_voted or (said is not None and said.phase in ("ready", "lost", "boundary"))

    def _tell_late(self, now_s: float) -> None:
        """Tell people who has not begun for long, or builds while the others wait."""
        coordinator, starts = self._coordinator, self._starts
        late = [name for name in starts.find_untold(now_s) if name in coordinator.workers]
        late = [name for name in late if not coordinator.workers[name].is_doomed]
        late = [name for name in late if name not in coordinator.members or self._is_awaited(name, late)]
        for name in late:
            starts.note_told(name, now_s)
        if late:
            self._tell_standstill(
                "; ".join(f"{name} {starts.describe(name, now_s)}{self._locate(name)}" for name in late)
            )

    def find_unstopped(self, asked_s: float) -> Iterator[Silent]:
        """Yield workers that do not get on though all were asked to stop; who waits for others can, once they end.

        Args:
            asked_s: Time at which all were asked.
        """
        now_s, patience = self._clock(), self._patience
        for name, worker in list(self._coordinator.workers.items()):
            if worker.is_doomed or worker.vote is not None:
                continue
            said, silent_s = self._said.get(name, Status()), now_s - self._beats.get(name, (-1, asked_s))[1]
            waits = said.waits or said.phase not in ("starting", "training")
            if said.step_phase == "save" or (waits and silent_s < patience.silence_s):
                self._free_s[name] = now_s
                continue
            still_s = min(said.still_s + silent_s, now_s - self._free_s.get(name, asked_s))
            limit_s = max(patience.stop_s, 2 * self._longest_s.get(name, 0.0))
            if still_s >= (patience.stuck_s if said.step_phase in ("evaluate", "loop") else limit_s):
                place = (said.place or "has not begun") + self._locate(name)
                yield Silent(name, f"{name} {place}, and made no progress for {still_s:.0f} s after it was asked")

    def _find_verdict(self, name: str) -> str:
        """Return what another worker says of one that hangs by its verdict, and has not voted; empty if nobody does."""
        workers = self._coordinator.workers
        votes = [vote for member in self._coordinator.members if (vote := workers[member].vote)]
        return next((vote.lost for vote in votes if name in vote.accused), "")

    def _find_stretch(self, name: str, silent: Mapping[str, float]) -> float:
        """Return the factor of times for a worker's silence: what is late here, or in all others, may be late in it.

        Args:
            name: Name of the worker.
            silent: Time since the last beat of each worker.
        """
        others = [self._said[other].late_s for other in silent if other != name and other in self._said]
        beats_late = min(others, default=0.0) / BEAT_INTERVAL_S
        return min(1.0 + max(beats_late, self.lateness.late_s / IDLE_S), _MOST_STRETCH)

    def _watch_all(self, silent: Mapping[str, float]) -> None:
        """Tell people if no worker gets on: each may wait for the others, so that none of them is judged.

        They are told again after four times as long. While a worker begins, all may wait for it (`_tell_late`).

        Args:
            silent: Time since the last beat of each worker.
        """
        members = self._coordinator.members
        said = {name: self._said[name] for name in members if name in self._said and name in silent}
        still_s = min([status.still_s + silent[name] for name, status in said.items()], default=0.0)
        limit_s = self._standstill_s * (_START_FACTOR if not all(status.place for status in said.values()) else 1)
        if said and len(said) == len(members) and still_s >= limit_s and not self._starts.begun:
            self._standstill_s *= 4
            waiting = [name for name in said if self._has_stopped(name)]
            others = [name for name in said if name not in waiting]
            places = [f"{name} {self._describe_place(name)}{self._locate(name)}" for name in others]
            places += [f"{', '.join(waiting)} wait{'s' * (len(waiting) == 1)} for the next epoch"] if waiting else []
            self._tell_standstill(f"no worker has made progress for {still_s:.0f} s: {'; '.join(places)}")

    def _describe_place(self, name: str) -> str:
        said = self._said[name]
        if said.connecting:
            return f"is connecting to {said.connecting}"
        if said.is_building:  # its phase is that of a step before
            return "waits for the others" if said.waits else "has not begun"
        return said.place or "has not begun"
