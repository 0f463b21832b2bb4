"""Common parts of rules whose workers step alone, and synchronise once in a period: settings and synchroniser."""

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
from paceline.sync.batch_statistics import pool_over_workers
from paceline.sync.every_step import EveryStep
from paceline.sync.local_hyperparameters import LocalHyperparameters, may_lengthen
from paceline.sync.outer_parameters import OuterParameters
from paceline.sync.outer_sgd import OuterSGD
from paceline.sync.reducer import GradientReducer
from paceline.sync.rule import Rule, Traffic
from paceline.sync.synchroniser import Abandoned, LocalStep, Synchroniser, SyncResult, WorkerContext


class PeriodicRule(Rule):
    """Settings of a rule whose workers step alone and exchange differences of parameters once in a period."""

    period: int = Field(default=16, ge=1)
    """Steps from one exchange to the next."""
    codec: Codec = NoCodec()
    """Codec of the differences; its residuals are added to the next ones."""
    program: Algorithm | None = None
    """Collective program that sums the differences; by default the group's own choice."""

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
        """Always false: replicas are equal only after a sync step."""
        return False

    @property
    def survives_loss(self) -> bool:
        """Whether workers step together: then each keeps its own parameters, and what all have in common."""
        return not self.is_asynchronous

    def reduce_ranks(self, group: Group, step: int) -> Sequence[int]:
        """Return this worker alone, which steps by its own gradient."""
        return [group.rank]

    def start_difference_reducer(self, group: Group, seed: int) -> GradientReducer:
        """Return the reducer of differences of parameters."""
        return EveryStep(codec=self.codec, program=self.program).start_reducer(group, seed)

    def start_hyperparameters(self, context: WorkerContext, first_step: int) -> LocalHyperparameters:
        """Return the hyper-parameters of steps that a worker takes alone: by default those that were given."""
        return LocalHyperparameters(context.optimizer)

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """One all-reduce a period, of differences, encoded if there is a codec."""
        num_bytes = 4 * sum(shape.numel() for shape in shapes)
        wire_bytes = sum(self.codec.wire_bytes(shape, num_workers) for shape in shapes)
        return (Traffic("all_reduce", num_bytes, wire_bytes, self.period),)


class AveragingRule(PeriodicRule):
    """Settings of a periodic rule that says how a worker's adaptive optimizer steps while the worker is alone."""

    local_beta1: float | None = Field(default=0.5, ge=0, lt=1)
    """Largest beta1 of Adam and its kin while workers step alone, since momentum from before a sync step leads away
    from where workers meet; null leaves the optimizer's."""
    scale_rate: bool = True
    """Whether learning rates of adaptive optimizers are multiplied by the fourth root of the number of workers while
    each steps alone: they divide by the size of their own gradients, whose noise is that of a smaller batch. The
    square root, which would undo that where gradients are all noise (Malladi et al. 2022, arXiv:2205.10287), ended
    hardly better on text and worse on images."""

    def start_hyperparameters(self, context: WorkerContext, first_step: int) -> LocalHyperparameters:
        """Return the hyper-parameters of steps from `first_step` on; those given if nobody steps alone in them."""
        num_apart = context.group.size / len(self.reduce_ranks(context.group, first_step))
        if num_apart == 1:
            return super().start_hyperparameters(context, first_step)
        is_longer = self.scale_rate and may_lengthen(context.optimizer, context.group.rank)
        factor = num_apart**0.25 if is_longer else 1.0
        return LocalHyperparameters(context.optimizer, self.local_beta1, factor)


class LocalRule(AveragingRule):
    """Settings of a periodic rule with optional synchronous steps at the beginning."""

    synchronous_steps: int = Field(default=0, ge=0)
    """Steps at the beginning in which gradients are averaged at every step, like every_step without a codec: workers
    drift apart most there (Lin et al. 2020, arXiv:1808.07217; DiLoCo's paper starts from a model that was trained like
    that). Then each worker has the same parameters and the same optimizer state. It should cover the warm-up of the
    learning rate."""

    def reduce_ranks(self, group: Group, step: int) -> Sequence[int]:
        """Return all workers in the synchronous steps, then the worker itself."""
        return range(group.size) if step < self.synchronous_steps else super().reduce_ranks(group, step)

    def next_change(self, step: int) -> int | None:
        """Return the end of the synchronous steps, if it lies ahead."""
        return self.synchronous_steps if step < self.synchronous_steps else None

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """One all-reduce of gradients in each synchronous step, then the traffic of workers that step alone."""
        start = self.synchronous_steps
        local = tuple(replace(each, first_step=start) for each in self.local_traffic(shapes, num_workers))
        if not start:
            return local
        gradients = (replace(each, end_step=start) for each in EveryStep().traffic(shapes, num_workers))
        return (*gradients, *local)

    def local_traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """Return the traffic of workers that step alone: by default one all-reduce a period."""
        return super().traffic(shapes, num_workers)


def check_start(is_local: bool, number: int, synchronous_steps: int) -> None:
    """Raise SettingsError if workers, by their checkpoint, step alone already and here do not yet."""
    if is_local and number < synchronous_steps:
        raise SettingsError(
            f"synchronous_steps must be as in the checkpoint, whose workers step alone in step {number} already, but "
            f"got {synchronous_steps}; resume with the same settings of sync"
        )


class SyncSchedule:
    """Which steps are sync steps: the last of each period.

    Args:
        period: Number of steps of a period.
        start: Number of steps before the first period.
    """

    def __init__(self, period: int, start: int = 0) -> None:
        self.period, self.start = period, start

    def is_due(self, number: int) -> bool:
        """Return whether step `number` is a sync step; the same on every worker."""
        return number >= self.start and (number + 1 - self.start) % self.period == 0

    def last_before(self, number: int) -> int:
        """Return the number of updates after the last sync step before step `number`, or before the first period."""
        return number - max(number - self.start, 0) % self.period

    def record(self, number: int, waited_s: float, group: Group) -> None:
        """Measure a sync step whose exchange took `waited_s`; every worker calls it."""

    def skip(self, number: int) -> None:
        """Go on from a sync step that could not be measured, since workers were lost."""

    def state(self) -> dict[str, Tensor]:
        """Return the measured state: the same on all workers."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state`."""


class PeriodicSynchroniser(Synchroniser):
    """Averages all parameters at sync steps, and pools the statistics of BatchNorm.

    Args:
        context: The worker's model, optimizer and group.
        rule: Rule that says how differences are exchanged.
        schedule: Schedule of the sync steps.
        outer: Optimizer of the outer parameters; None moves them to the workers' mean.
    """

    def __init__(
        self, context: WorkerContext, rule: PeriodicRule, schedule: SyncSchedule, outer: OuterSGD | None = None
    ) -> None:
        self._context, self._schedule, self._outer = context, schedule, outer
        self._reducer = rule.start_difference_reducer(context.group, context.seed)
        self._feedback = ErrorFeedback(self._reducer, rule.codec, context)
        self._hyperparameters = rule.start_hyperparameters(context, schedule.start)
        self._outer_parameters: OuterParameters | None = None
        self._weight = 0.0
        self._exchanged: int | None = None
        """Sync step under way, once its exchange has begun."""
        self._is_applied = False
        """Whether parameters are those after it."""

    def is_sync_step(self, number: int) -> bool:
        """Return whether the schedule has a sync step there."""
        return self._schedule.is_due(number)

    def before_update(self, step: LocalStep) -> None:
        """Change the optimizer's hyper-parameters; copy the common parameters before the first step alone.

        Raises:
            SettingsError: A checkpoint of workers that stepped alone was loaded, but they do not step alone here.
        """
        check_start(self._outer_parameters is not None, step.number, self._schedule.start)
        if self._outer_parameters is None and step.number >= self._schedule.start:
            self._outer_parameters = self._make_outer_parameters()
        if self._outer_parameters is not None:
            self._hyperparameters.apply()

    def after_update(self, step: LocalStep) -> SyncResult:
        """Exchange and update parameters at the end of a period; nothing if no worker had a sample in it."""
        self._hyperparameters.restore()
        self._weight = step.weight
        if self._outer_parameters is None or not self.is_sync_step(step.number):
            return SyncResult()
        waited_s, wire_bytes = 0.0, 0
        self._exchanged, self._is_applied = step.number, not step.total_weight
        if step.total_weight:
            began_s = time.perf_counter()
            self._outer_parameters.send(step.weight, step.total_weight, step.number)
            self._outer_parameters.receive()
            waited_s = time.perf_counter() - began_s
            self._outer_parameters.apply(self._outer)
            self._is_applied = True
            wire_bytes = self._outer_parameters.wire_bytes
            wire_bytes += pool_over_workers(self._context.module, self._context.group, step.weight)
        self._weight = 0.0
        self._schedule.record(step.number, waited_s, self._context.group)
        self._exchanged, self._is_applied = None, False
        return SyncResult(waited_s, wire_bytes)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """While active, parameters are the workers' mean, by the samples used since the last sync step."""
        with self._outer_parameters.averaged(self._weight) if self._outer_parameters is not None else nullcontext():
            yield

    def abandon(self) -> Abandoned:
        """Drop the exchange; parameters are then this worker's own, and the outer ones those of the period before.

        If they are those after it already, only what is pooled or measured is left out.
        """
        if self._outer_parameters is not None:
            self._outer_parameters.abandon()
        number, self._exchanged = self._exchanged, None
        if number is None:
            return Abandoned.TORN
        if self._is_applied:
            self._weight, self._is_applied = 0.0, False
            self._schedule.skip(number)
            return Abandoned.DONE
        return Abandoned.DUE

    def last_exchange(self, number: int) -> int:
        """Return the end of the period before."""
        return self._schedule.last_before(number)

    def shared_state(self) -> dict[str, Tensor]:
        """Return the outer parameters, the outer optimizer's state, and the state of the schedule."""
        state = self._outer_parameters.state() if self._outer_parameters is not None else {}
        return state | (self._outer.state() if self._outer is not None else {}) | self._schedule.state()

    def state(self) -> dict[str, Tensor]:
        """Return the codec's residuals."""
        return self._feedback.state()

    def detached_state(self) -> dict[str, Tensor]:
        """Return the residuals that this worker holds, as a worker and for others."""
        return self._feedback.state(is_detached=True)

    def load_state(self, saved: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor]) -> None:
        """Continue the period; with another number of workers, from the outer parameters in the state."""
        self._outer_parameters = None
        if any(name.startswith("parameters/") for name in shared):
            self._outer_parameters = self._make_outer_parameters()
            self._outer_parameters.load_state(shared)
        if self._outer is not None:
            self._outer.load_state(shared, warns=self._context.group.rank == 0)
        self._schedule.load_state(shared)
        self._feedback.load_state(saved)

    def document(self) -> dict[str, Any]:
        """Return the weight of this worker's samples in the period."""
        return {"weight": self._weight}

    def load_document(self, document: Mapping[str, Any]) -> None:
        """Load it."""
        self._weight = document["weight"]

    def close(self) -> None:
        """Close connections and threads."""
        self._reducer.close()

    def _make_outer_parameters(self) -> OuterParameters:
        values = {name: parameter.detach() for name, parameter in self._context.parameters.items()}
        return OuterParameters("parameters", values, self._context.group, self._reducer)


class ErrorFeedback:
    """Residuals of a codec of differences, saved to and loaded from a checkpoint.

    Args:
        reducer: Reducer that keeps them.
        codec: Codec of the reducer.
        context: Context of the worker.
        shapes: Shapes of the blocks; by default of the parameters.
        kind: Prefix of the tensors' names.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        codec: Codec,
        context: WorkerContext,
        shapes: Mapping[str, Size] | None = None,
        kind: str = "feedback",
    ) -> None:
        self._reducer, self._kind, self._prefix = reducer, kind, f"{kind}/{codec.name}/"
        self._shapes = shapes or {name: parameter.shape for name, parameter in context.parameters.items()}
        self._has_warned = context.group.rank != 0

    def state(self, *, is_detached: bool = False) -> dict[str, Tensor]:
        """Return the residuals, as named tensors; `is_detached`: for any other number of workers."""
        kept = self._reducer.detached_state(self._shapes) if is_detached else self._reducer.state()
        return {f"{self._prefix}{name}": tensor for name, tensor in kept.items()}

    def load_state(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Load the residuals that all workers saved; those of another codec are dropped, with a warning."""
        kept = [
            {name.removeprefix(self._prefix): t for name, t in tensors.items() if name.startswith(self._prefix)}
            for tensors in saved
        ]
        if any(kept):
            self._reducer.load_state(kept, self._shapes)
        elif any(name.startswith(f"{self._kind}/") for tensors in saved for name in tensors) and not self._has_warned:
            warnings.warn(
                "residuals of another codec are dropped; resume with the same codec to keep them",
                FeedbackDroppedWarning,
                stacklevel=2,
            )
