"""Landing bucket by bucket: the optimizer steps with each bucket as it arrives, while others are in transit."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.errors import SettingsError
from paceline.optim.torch_rules import BY_ELEMENT, is_known, updates_by_element
from paceline.replica.buckets import Bucket
from paceline.replica.gradients import Gradients
from paceline.replica.step_result import BucketTimes
from paceline.sync.reducer import FlatBucket, GradientReducer
from paceline.sync.rule import Rule
from paceline.topology.layout import Layout

Landing = Literal["update", "arrival", "next_forward"]
"""Moment at which the optimizer applies a bucket: with all others, at its arrival, or just before its next use."""


class StepCopies:
    """Copies of parameters and of the optimizer's state of them, as they were before the step under way.

    Args:
        optimizer: Optimizer, whose state is all that its steps change beside parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._copies: dict[tuple[int, str], Tensor] = {}
        self._states: dict[Tensor, dict[str, Any]] = {}

    def note(self, parameters: Iterable[Tensor], *, with_values: bool = True) -> None:
        """Copy what a step of these parameters may change; memory of former copies is used again.

        Args:
            parameters: The parameters.
            with_values: Whether the parameters change themselves, and not the optimizer's state alone.
        """
        for parameter in parameters:
            values = {"": parameter.detach()} if with_values else {}
            held = values | self._optimizer.state.get(parameter, {})
            self._states[parameter] = {
                key: self._copy(parameter, key, value) if isinstance(value, Tensor) else value
                for key, value in held.items()
            }

    def forget(self) -> None:
        """Forget the step, which has ended."""
        self._states = {}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore what was copied."""
        for parameter, copied in self._states.items():
            if "" in copied:
                parameter.copy_(copied.pop(""))
            state = self._optimizer.state[parameter]
            for key in state.keys() - copied.keys():
                del state[key]
            for key, value in copied.items():
                if isinstance(value, Tensor):
                    state[key].copy_(value)
                else:
                    state[key] = value
            if not state:
                del self._optimizer.state[parameter]
        self.forget()

    def _copy(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        copied = self._copies.get((id(parameter), key))
        if copied is None or copied.shape != value.shape or copied.dtype != value.dtype:
            copied = self._copies[id(parameter), key] = torch.empty_like(value)
        return copied.copy_(value)


class BucketLanding:
    """Applies buckets one by one as they arrive: the optimizer steps with the gradients of each.

    A replica knows no other interface of landing otherwise than at the update.

    Args:
        optimizer: Optimizer, which updates the parameters of one bucket at a time.
        rule: Synchronisation rule, which makes the reducer of buckets.
    """

    delay = 0
    """Number of updates after which the gradients of a step have been applied."""
    gradients: Gradients
    """Gradients whose buckets are applied."""
    is_eager = True
    """Whether buckets are launched while backward runs; else after it."""
    is_torn = False
    """Whether some buckets of a step have been applied, or noted by the optimizer, and others not."""
    gradient_norm: float | None = None
    """Norm of the last step's gradients before clipping; None without clipping."""

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Rule) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._pending: list[Bucket] = []
        self._unused: list[str] = []
        self.unused: list[str] = []
        """Parameters that no rank used in the last step that has been applied."""
        self._times: list[BucketTimes] = []
        self._settings: list[dict[str, Any]] = []
        self._divisor = 1.0
        self._step = 0
        self._copies: StepCopies | None = None

    def keep_copies(self) -> None:
        """Keep copies of what a step changes, so that one can be dropped that some buckets have been applied in.

        Not where steps are counted before they are applied, nor of an optimizer whose state may be elsewhere too.
        """
        if not self.delay and is_known(self._optimizer):
            self._copies = StepCopies(self._optimizer)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this worker sends in a step beside its buckets."""
        return 0

    @property
    def is_ready(self) -> bool:
        """Whether buckets are applied one by one already; until then they are applied at the update."""
        return True

    def start_reducer(self, group: Group, seed: int = 0, *, step: int = 0) -> GradientReducer:
        """Return the reducer of buckets; see `Rule.start_reducer`."""
        return self._rule.start_reducer(group, seed, step=step)

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run forward."""
        return forward()

    def begin_backward(self) -> None:
        """Prepare for a backward pass."""

    def arm(self, share: float | Tensor, step: int) -> None:
        """Prepare for the exchange of a step's gradients, of which this worker's are multiplied by its `share`."""

    def before_launch(self, bucket: FlatBucket) -> None:
        """Change what a bucket sends."""

    def end_backward(self) -> None:
        """Refuse wrong gradients after a backward pass."""

    def end_step(self) -> None:
        """Measure a step that has ended, while buckets are not applied one by one yet; every rank calls it."""

    def state_dict(self) -> dict[str, float]:
        """Return the state that a checkpoint keeps, the same on all workers, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load a saved state."""

    def close(self) -> None:
        """Remove the hooks from the modules."""

    def land(self, divisor: float, step: int) -> list[BucketTimes]:
        """Apply the step's buckets as they arrive, and return their times."""
        self.begin(divisor, step)
        self.flush()
        return self.take_times()

    def begin(self, divisor: float, step: int) -> None:
        """Accept the step's buckets, to apply with the optimizer's present settings."""
        self._pending = list(self.gradients.buckets)
        for bucket in self._pending:
            bucket.drop_gradients()  # the optimizer must see those of one bucket at a time
        self._settings = [_copy_settings(group) for group in self._optimizer.param_groups]
        self._divisor, self._step = divisor, step
        self.is_torn = self.delay > 0  # the step counts as done already

    def drop(self) -> bool:
        """Forget the step under way, whose peers are lost, and return whether it is applied in part."""
        self._pending = []
        if self.is_torn and self._copies is not None:
            self._copies.restore()
            self.is_torn = False
        return self.is_torn

    def flush(self) -> set[str]:
        """Apply the remaining buckets, and return their parameters."""
        late = {slot.name for bucket in self._pending for slot in bucket.slots}
        self.land_those_of(late)
        return late

    def take_times(self) -> list[BucketTimes]:
        """Return the times of the buckets that were applied since the last call."""
        times, self._times = self._times, []
        return times

    def land_those_of(self, names: Collection[str]) -> None:
        """Apply the buckets that contain any of these parameters."""
        for bucket in [b for b in self._pending if any(slot.name in names for slot in b.slots)]:
            self._pending.remove(bucket)
            self._land(bucket)

    @torch.no_grad()
    def _land(self, bucket: Bucket) -> None:
        self._unused += self.gradients.receive([bucket], self._divisor)
        self.gradients.check_finite([bucket], self._step, may_skip=False)
        self.is_torn = True
        if self._copies is not None:
            self._copies.note(slot.parameter for slot in bucket.slots)
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        for group, settings in zip(groups, self._settings, strict=True):
            group.update(settings)
        self._optimizer.step()  # only this bucket's parameters have a gradient
        for group, settings in zip(groups, now, strict=True):
            group.update(settings)
        self._times.append(self.gradients.time(bucket))
        bucket.drop_gradients()
        bucket.reset()
        if not self._pending:
            self.gradients.reducer.commit(self._unused)
            self.unused, self._unused = self._unused, []
            self.is_torn = False
            if self._copies is not None:
                self._copies.forget()


def check_landing(
    landing: Landing,
    *,
    precision: str,
    clip_norm: float | None,
    rule: Rule,
    layout: Layout,
    optimizer: torch.optim.Optimizer | None = None,
    is_compiled: bool = False,
    is_noise_measured: bool = False,
    is_averaged: bool = False,
) -> None:
    """Refuse to apply bucket by bucket if some setting needs the whole step first, or allows nothing in between.

    Raises:
        SettingsError: A setting does not allow it; the message names it.
    """
    if landing == "update":
        return
    reason = ""
    if clip_norm is not None:
        reason = "where gradients are clipped, by the norm of all of them; give clip_norm=None (--clip_norm none)"
    elif precision == "fp16":
        reason = "with fp16, which must know of an overflow anywhere first; take bf16 or fp32"
    elif not rule.keeps_replicas_equal:
        reason = f"with sync {rule.name}; leave landing out"
    elif not layout.is_plain:
        reason = "where ranks share a model; leave landing out"
    elif is_noise_measured:
        reason = "where the gradient noise scale is measured; leave one of them out"
    elif is_averaged and landing == "next_forward":
        reason = "with ema, an average of parameters that are still to change then; leave one of them out"
    elif is_compiled and landing == "next_forward":
        reason = "with a compiled model, inside which no bucket can be applied; leave one of them out"
    elif optimizer is not None and not updates_by_element(optimizer):
        known = ", ".join(kind.__name__ for kind in BY_ELEMENT)
        reason = f"with {type(optimizer).__name__}, which may need the whole step at once; take one of {known}"
    if reason:
        raise SettingsError(f"landing must be update, but got {landing} {reason}")


def _copy_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter group's settings, which schedulers may change before their use, tensors in place."""
    settings = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in settings.items()}
