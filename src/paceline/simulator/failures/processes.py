"""Processes by which hosts fail or are taken away, for many trials at once."""

import csv
from abc import abstractmethod
from math import gamma
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from paceline.errors import SettingsError
from paceline.registry import Family, register
from paceline.topology.cluster import Floats, Integers

_MOST_STATES = 2 * 10**7
"""Largest number of trials times hosts whose ages are kept."""


class Arrivals(Protocol):
    """Coming events of each trial."""

    next_s: Floats
    """Time of the next event of each trial."""

    def advance(self, trials: Integers) -> None:
        """Draw the events after the next ones of `trials`, which have happened."""


class FailureProcess(Family):
    """Settings of a process that takes hosts from a run."""

    family = "failure process"

    @abstractmethod
    def mean_gap_s(self, num_hosts: int) -> float:
        """Return the mean time between two events of `num_hosts` hosts; infinite for none."""

    @abstractmethod
    def start(self, generator: np.random.Generator, num_trials: int, num_hosts: int) -> Arrivals:
        """Return the coming events of trials that begin at time 0, long after hosts were first used."""


@register("never")
class Never(FailureProcess):
    """No events."""

    def mean_gap_s(self, num_hosts: int) -> float:
        """Return infinity."""
        return float("inf")

    def start(self, generator: np.random.Generator, num_trials: int, num_hosts: int) -> Arrivals:
        """Return no events."""
        return _Poisson(generator, num_trials, float("inf"))


@register("exponential")
class Exponential(FailureProcess):
    """Events that come at random, whatever the age of a host."""

    # Llama 3 (2024), table 5: 419 unexpected interruptions in 54 days of 2,048 hosts of 8 devices.
    mtbf_hours: float = Field(default=6300.0, gt=0)
    """Mean time between two events of one host."""

    def mean_gap_s(self, num_hosts: int) -> float:
        """Return the mean time between two events of all hosts."""
        return self.mtbf_hours * 3600 / num_hosts

    def start(self, generator: np.random.Generator, num_trials: int, num_hosts: int) -> Arrivals:
        """Return events of a Poisson process."""
        return _Poisson(generator, num_trials, self.mean_gap_s(num_hosts))


@register("weibull")
class Weibull(FailureProcess):
    """Events whose rate changes with the age of a host, which is new after each; a shape of 1 is exponential."""

    mtbf_hours: float = Field(default=6300.0, gt=0)
    """Mean time between two events of one host."""
    shape: float = Field(default=0.7, gt=0)
    """Shape: below 1 new hosts fail more often, as in records of large clusters; above 1 old ones."""

    def mean_gap_s(self, num_hosts: int) -> float:
        """Return the mean time between two events of all hosts."""
        return self.mtbf_hours * 3600 / num_hosts

    def start(self, generator: np.random.Generator, num_trials: int, num_hosts: int) -> Arrivals:
        """Return the events of hosts whose ages are those of a cluster that has run for long."""
        if num_trials * num_hosts > _MOST_STATES:
            raise SettingsError(
                f"num_trials x num_hosts must be at most {_MOST_STATES:,} with weibull, but {num_trials:,} x "
                f"{num_hosts:,} is more; lower num_trials, or take exponential"
            )
        scale_s = self.mtbf_hours * 3600 / gamma(1 + 1 / self.shape)
        return _Renewals(generator, num_trials, num_hosts, scale_s, self.shape)


@register("trace")
class FailureTrace(FailureProcess):
    """Recorded events of a whole cluster, replayed over and over from a random moment on, or a given one."""

    path: str
    """CSV file with a column time_s: seconds from the beginning of the record to each event."""
    kind: str | None = None
    """Events whose column kind has this value; none for all."""
    begin_s: float | None = Field(default=None, ge=0)
    """Moment of the record at which all trials begin; by default each begins at a random one."""
    length_hours: float | None = Field(default=None, gt=0)
    """Length of the record; by default up to its last event."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.read()
        return self

    def read(self) -> tuple[Floats, float]:
        """Return the times of events, and the length of the record.

        Raises:
            SettingsError: The file cannot be read, or holds no events in order.
        """
        try:
            rows = list(csv.DictReader(Path(self.path).read_text(encoding="utf-8").splitlines()))
            times = [float(row["time_s"]) for row in rows if self.kind in (None, row.get("kind"))]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"a trace must be a CSV file that can be read, but got {error}; check it") from error
        except (KeyError, TypeError, ValueError) as error:
            raise SettingsError(
                f"a trace must have a column time_s of numbers, but {self.path} has: {error!r}; correct it"
            ) from error
        length_s = self.length_hours * 3600 if self.length_hours is not None else times[-1] if times else 0.0
        if not times or times != sorted(times) or times[0] < 0 or times[-1] > length_s or length_s <= 0:
            what = "of that kind " if self.kind is not None else ""
            raise SettingsError(
                f"a trace must have events {what}in order, from 0 to its length, but {self.path} has {len(times)}, "
                f"and a length of {length_s:g} s; correct it"
            )
        return np.array(times), length_s

    def mean_gap_s(self, num_hosts: int) -> float:
        """Return the mean time between two recorded events, whatever the number of hosts."""
        times, length_s = self.read()
        return length_s / len(times)

    def start(self, generator: np.random.Generator, num_trials: int, num_hosts: int) -> Arrivals:
        """Return the recorded events, from another moment in each trial or from the given one."""
        times, length_s = self.read()
        begins_s = generator.uniform(0, length_s, num_trials)
        if self.begin_s is not None:
            begins_s = np.full(num_trials, self.begin_s % length_s)
        return _Replay(times, length_s, begins_s)


class _Poisson:
    def __init__(self, generator: np.random.Generator, num_trials: int, mean_s: float) -> None:
        self._generator, self._mean_s = generator, mean_s
        self.next_s = np.full(num_trials, np.inf)
        if np.isfinite(mean_s):
            self.next_s = generator.exponential(mean_s, num_trials)

    def advance(self, trials: Integers) -> None:
        self.next_s[trials] += self._generator.exponential(self._mean_s, len(trials))


class _Renewals:
    """Hosts, each with the time of its next event."""

    def __init__(
        self, generator: np.random.Generator, num_trials: int, num_hosts: int, scale_s: float, shape: float
    ) -> None:
        self._generator, self._scale_s, self._shape = generator, scale_s, shape
        # The gap that a random moment falls into is longer than others by its length; what is left of it is uniform.
        gaps = generator.gamma(1 + 1 / shape, size=(num_trials, num_hosts)) ** (1 / shape)
        self._hosts = scale_s * gaps * generator.uniform(size=gaps.shape)
        self.next_s: NDArray[np.float64] = self._hosts.min(axis=1)

    def advance(self, trials: Integers) -> None:
        host = self._hosts[trials].argmin(axis=1)
        gaps = self._scale_s * self._generator.weibull(self._shape, len(trials))
        self._hosts[trials, host] += gaps
        self.next_s[trials] = self._hosts[trials].min(axis=1)


class _Replay:
    def __init__(self, times_s: Floats, length_s: float, begins_s: Floats) -> None:
        self._times_s, self._length_s, self._begins_s = times_s, length_s, begins_s
        self._index = np.searchsorted(times_s, begins_s, side="right")
        self.next_s = np.zeros(len(begins_s))
        self._find(np.arange(len(begins_s)))

    def advance(self, trials: Integers) -> None:
        self._index[trials] += 1
        self._find(trials)

    def _find(self, trials: Integers) -> None:
        rounds, place = np.divmod(self._index[trials], len(self._times_s))
        self.next_s[trials] = rounds * self._length_s + self._times_s[place] - self._begins_s[trials]
