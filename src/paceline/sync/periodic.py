"""What rules have in common whose workers step alone, and meet once in a period: settings, and who does the meeting."""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Self

from pydantic import Field, model_validator
from torch import Size, Tensor

from paceline.comm.group import Group
from paceline.compression import Codec, NoCodec
from paceline.compression.codec import FeedbackDroppedWarning
from paceline.errors import SettingsError
from paceline.programs import Algorithm
from paceline.sync.anchor import Anchor
from paceline.sync.batch_statistics import pool_over_workers
from paceline.sync.every_step import EveryStep
from paceline.sync.exchanger import Exchanger
from paceline.sync.outer_sgd import OuterSGD
from paceline.sync.rule import Rule, Traffic
from paceline.sync.synchroniser import LocalStep, Outcome, Site, Synchroniser


class PeriodicRule(Rule):
    """Settings of a rule whose workers step alone and exchange differences of parameters once in a period."""

    period: int = Field(default=16, ge=1)
    """Steps from one exchange to the next."""
    codec: Codec = NoCodec()
    """How differences are made smaller for the wire; what it holds back is added to the next ones."""
    program: Algorithm | None = None
    """The collective program that sums them; by default what the group thinks best."""

    @model_validator(mode="after")
    def _check_exchange(self) -> Self:
        if self.codec.carries_momentum:
            raise SettingsError(
                f"the codec of {self.name} must not carry momentum, but got {self.codec.name}; "
                "take one without, such as top_k"
            )
        EveryStep(codec=self.codec, program=self.program)
        return self

    @property
    def keeps_replicas_equal(self) -> bool:
        """Only where workers meet."""
        return False

    def near(self, group: Group, step: int) -> Sequence[int]:
        """Each worker steps by its own gradient."""
        return [group.rank]

    def start_differences(self, group: Group, seed: int) -> Exchanger:
        """Return what sums differences of parameters."""
        return EveryStep(codec=self.codec, program=self.program).start_exchanger(group, seed)

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """One all-reduce a period, of differences as the codec makes them."""
        num_bytes = 4 * sum(shape.numel() for shape in shapes)
        wire_bytes = sum(self.codec.wire_bytes(shape, num_workers) for shape in shapes)
        return (Traffic("all_reduce", num_bytes, wire_bytes, self.period),)


class LocalRule(PeriodicRule):
    """Settings of a periodic rule whose workers may keep together at first."""

    synchronous_steps: int = Field(default=0, ge=0)
    """Steps at the beginning in which gradients are averaged at every step, as every_step does it without a codec: it
    is where workers drift apart most (Lin et al. 2020, arXiv:1808.07217; DiLoCo's paper starts from a model that was
    trained so). Then each worker has the same parameters and the same optimizer state. Best it covers the warm-up of
    the learning rate."""

    def near(self, group: Group, step: int) -> Sequence[int]:
        """Return all workers in the synchronous steps, then the worker itself."""
        return range(group.size) if step < self.synchronous_steps else super().near(group, step)

    def next_change(self, step: int) -> int | None:
        """Return the end of the synchronous steps."""
        return self.synchronous_steps if step < self.synchronous_steps else None

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """One all-reduce of gradients in each synchronous step, then what workers that step alone exchange."""
        start = self.synchronous_steps
        local = tuple(replace(each, first_step=start) for each in self.local_traffic(shapes, num_workers))
        if not start:
            return local
        gradients = (replace(each, end_step=start) for each in EveryStep().traffic(shapes, num_workers))
        return (*gradients, *local)

    def local_traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """Return what workers that step alone exchange: by default one all-reduce a period."""
        return super().traffic(shapes, num_workers)


def check_start(is_local: bool, number: int, synchronous_steps: int) -> None:
    """Raise SettingsError where workers, by their checkpoint, step alone already and here do not yet."""
    if is_local and number < synchronous_steps:
        raise SettingsError(
            f"synchronous_steps must be as in the checkpoint, whose workers step alone in step {number} already, but "
            f"got {synchronous_steps}; resume with the same settings of sync"
        )


class Calendar:
    """When workers meet: in the last step of each period.

    Args:
        period: Steps of a period.
        start: Steps done before the first one begins.
    """

    def __init__(self, period: int, start: int = 0) -> None:
        self.period, self.start = period, start

    def is_due(self, number: int) -> bool:
        """Return whether workers meet in step `number`; the same on every worker."""
        return number >= self.start and (number + 1 - self.start) % self.period == 0

    def note(self, number: int, waited_s: float, group: Group) -> None:
        """Learn from a meeting that took `waited_s`; every worker calls it."""

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt: the same on all workers."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take on what `state` returned."""


class PeriodicSynchroniser(Synchroniser):
    """Lands all parameters at once where workers meet, and pools the statistics of BatchNorm.

    Args:
        site: Where it works.
        rule: Says how differences are exchanged.
        calendar: Says when.
        outer: How the common parameters move; to the workers' mean without it.
    """

    def __init__(self, site: Site, rule: PeriodicRule, calendar: Calendar, outer: OuterSGD | None = None) -> None:
        self._site, self._calendar, self._outer = site, calendar, outer
        self._exchanger = rule.start_differences(site.group, site.seed)
        self._feedback = Feedback(self._exchanger, rule.codec, site)
        self._anchor: Anchor | None = None
        self._mass = 0.0

    def meets(self, number: int) -> bool:
        """Meet when the calendar says so."""
        return self._calendar.is_due(number)

    def before_update(self, step: LocalStep) -> None:
        """Note what workers have in common before the first step that each takes alone.

        Raises:
            SettingsError: A checkpoint of workers that stepped alone was loaded, but they do not step alone here.
        """
        check_start(self._anchor is not None, step.number, self._calendar.start)
        if self._anchor is None and step.number >= self._calendar.start:
            self._anchor = self._make_anchor()

    def after_update(self, step: LocalStep) -> Outcome:
        """Exchange and land at the end of a period; nothing if nobody had a sample in it."""
        self._mass = step.mass
        if self._anchor is None or not self.meets(step.number):
            return Outcome()
        self._mass = 0.0
        waited_s, wire_bytes = 0.0, 0
        if step.total_mass:
            began_s = time.perf_counter()
            self._anchor.send(step.mass, step.total_mass, step.number)
            self._anchor.arrive()
            waited_s = time.perf_counter() - began_s
            self._anchor.land(self._outer)
            wire_bytes = self._anchor.wire_bytes
            wire_bytes += pool_over_workers(self._site.module, self._site.group, step.mass)
        self._calendar.note(step.number, waited_s, self._site.group)
        return Outcome(waited_s, wire_bytes)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, parameters are the workers' mean, by the samples used since they last met."""
        with self._anchor.averaged(self._mass) if self._anchor is not None else nullcontext():
            yield

    def shared_state(self) -> dict[str, Tensor]:
        """Return the anchor, the outer optimizer's state, and what the calendar has learnt."""
        state = self._anchor.state() if self._anchor is not None else {}
        return state | (self._outer.state() if self._outer is not None else {}) | self._calendar.state()

    def state(self) -> dict[str, Tensor]:
        """Return what the codec holds back."""
        return self._feedback.state()

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Go on in the period; among another number of workers, with the anchor that those who saved had."""
        self._anchor = None
        if any(name.startswith("parameters/") for name in shared):
            self._anchor = self._make_anchor()
            self._anchor.load_state(shared)
        if self._outer is not None:
            self._outer.load_state(shared)
        self._calendar.load_state(shared)
        self._feedback.load_state(saved)

    def document(self) -> dict[str, Any]:
        """Return this worker's mass in the period."""
        return {"mass": self._mass}

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Take it on."""
        self._mass = document["mass"]

    def close(self) -> None:
        """Let connections and threads go."""
        self._exchanger.close()

    def _make_anchor(self) -> Anchor:
        values = {name: parameter.detach() for name, parameter in self._site.parameters.items()}
        return Anchor("parameters", values, self._site.group, self._exchanger)


class Feedback:
    """What a codec holds back of differences, on its way into a checkpoint and out of it.

    Args:
        exchanger: Keeps it.
        codec: Its codec.
        site: Where it is kept.
        shapes: Of the blocks; of the parameters without it.
        kind: What its tensors are called.
    """

    def __init__(
        self,
        exchanger: Exchanger,
        codec: Codec,
        site: Site,
        shapes: Mapping[str, Size] | None = None,
        kind: str = "feedback",
    ) -> None:
        self._exchanger, self._kind, self._prefix = exchanger, kind, f"{kind}/{codec.name}/"
        self._shapes = shapes or {name: parameter.shape for name, parameter in site.parameters.items()}
        self._is_told = site.group.rank != 0

    def state(self) -> dict[str, Tensor]:
        """Return it, as named tensors."""
        return {f"{self._prefix}{name}": tensor for name, tensor in self._exchanger.state().items()}

    def load_state(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Take on what all workers saved; what another codec has held back is lost, with a warning."""
        kept = [
            {name.removeprefix(self._prefix): t for name, t in tensors.items() if name.startswith(self._prefix)}
            for tensors in saved
        ]
        if any(kept):
            self._exchanger.load_state(kept, self._shapes)
        elif any(name.startswith(f"{self._kind}/") for tensors in saved for name in tensors) and not self._is_told:
            warnings.warn(
                "parts of differences that another codec had held back are lost; resume with the same codec to keep "
                "them",
                FeedbackDroppedWarning,
                stacklevel=2,
            )
