"""Scaling by a policy: the launcher measures throughput, and asks a function how many workers it wants."""

import contextlib
import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.comm.threads import start_thread
from paceline.elastic.facts import Fact, Scaled
from paceline.elastic.policy import POLICIES, ScaleFacts, ScalePolicy, check_answer, read_prices
from paceline.elastic.protocol import Coordinator
from paceline.errors import SettingsError
from paceline.functions import find_function
from paceline.monitor.encoding import from_json
from paceline.monitor.events import EventError, StepFinished
from paceline.monitor.growth import GrowingFile

_LEAST_STEPS = 3
_STEP = b'{"kind":"step_finished"'


@dataclass(frozen=True)
class PolicySettings:
    """Settings of the scaling by a policy.

    Args:
        policy: Name of a policy, or a function as ``file.py:function``.
        interval_s: Time between two calls.
        prices: File of prices, if the policy needs one.
    """

    policy: str
    interval_s: float = 60.0
    prices: Path | None = None

    def find_policy(self) -> ScalePolicy:
        """Return the function.

        Raises:
            SettingsError: There is none, or it takes other arguments; or the prices cannot be read.
        """
        if self.prices is not None:
            read_prices(self.prices)
        if self.policy in POLICIES:
            return POLICIES[self.policy]
        if ":" not in self.policy:
            raise SettingsError(
                f"--scale_policy must be one of {', '.join(POLICIES)}, or file.py:function, but got {self.policy}"
            )
        function = find_function(self.policy)
        try:
            inspect.signature(function).bind(None)
        except (TypeError, ValueError) as error:
            raise SettingsError(
                f"--scale_policy {self.policy} must take one argument, the ScaleFacts, but: {error}; mend the function"
            ) from error
        return function


class PolicyCaller:
    """Calls a policy now and then, in a thread of its own: it may take its time, and the disk of the prices too.

    Args:
        scaling: Settings.
        log: Log of the run.
        most_workers: Largest number of workers that the run can have.
        warn: Function that is told what is wrong with the policy, or what it reads, once.
        clock: Clock of seconds.
    """

    def __init__(
        self,
        scaling: PolicySettings,
        log: Path,
        most_workers: int,
        warn: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scaling, self._policy = scaling, scaling.find_policy()
        self._log, self._most_workers, self._warn, self._clock = GrowingFile(log), most_workers, warn, clock
        self._warned: set[str] = set()
        self._called_s = clock()
        self._thread: threading.Thread | None = None
        self._answer: int | BaseException | None = None
        self._asked_epoch = -1
        self._by_size: dict[int, float] = {}

    def read_facts(self, coordinator: Coordinator) -> list[Fact]:
        """Return what the policy wants since the last call, if it wants a change."""
        if self._thread is not None:
            return self._take_answer(coordinator)
        size = len(coordinator.members)
        is_settled = coordinator.view is not None and size == coordinator.target and not coordinator.is_asked
        if not is_settled or self._clock() - self._called_s < self._scaling.interval_s:
            return []
        self._called_s = self._clock()
        samples_per_s = self._measure(coordinator.epoch)
        if samples_per_s is None:
            return []
        self._by_size[size] = samples_per_s
        facts = ScaleFacts(size, self._most_workers, samples_per_s, dict(self._by_size))
        self._asked_epoch, self._answer = coordinator.epoch, None
        self._thread = start_thread(self._call, facts, name="paceline-policy")
        return []

    def _call(self, facts: ScaleFacts) -> None:
        try:
            if self._scaling.prices is not None:
                facts = replace(facts, prices=read_prices(self._scaling.prices))
            self._answer = check_answer(self._policy(facts), self._most_workers)
        except BaseException as error:  # sys.exit too: it would end this thread alone, without a word
            self._answer = error

    def _take_answer(self, coordinator: Coordinator) -> list[Fact]:
        assert self._thread is not None
        if self._thread.is_alive():
            if self._clock() - self._called_s > 2 * self._scaling.interval_s:
                read = f", which reads {self._scaling.prices} first," if self._scaling.prices is not None else ""
                self._warn_once(
                    f"{self._scaling.policy}{read} has not returned for two intervals; workers stay as they are"
                )
            return []
        self._thread = None
        if isinstance(self._answer, int):
            is_news = self._answer != coordinator.target and self._asked_epoch == coordinator.epoch
            return [Scaled(self._answer)] if is_news else []
        why = str(self._answer)
        if not isinstance(self._answer, SettingsError):
            why = f"{self._scaling.policy} failed: {type(self._answer).__name__}: {why}"
        self._warn_once(f"the workers stay as they are, since {why}")
        return []

    def _measure(self, epoch: int) -> float | None:
        """Return the throughput of the epoch since the last call; None if it has too few steps."""
        ours: list[tuple[float, int]] = []
        for line in (line for piece in self._log.read() for line in piece.splitlines()):
            if line.startswith(_STEP):
                with contextlib.suppress(EventError):  # a full disk took a part of the line
                    record = from_json(line.decode(errors="replace"))
                    if record.epoch == epoch and isinstance(record.event, StepFinished):
                        ours.append((record.time_s, record.event.position))  # all by the first worker's clock
        if len(ours) < _LEAST_STEPS or ours[-1][0] <= ours[0][0]:
            return None
        return float((ours[-1][1] - ours[0][1]) / (ours[-1][0] - ours[0][0]))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)
