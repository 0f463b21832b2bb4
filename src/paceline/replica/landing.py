"""Gradients that land bucket by bucket: each as it arrives, or in the next forward, before its parameters are used."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from paceline.errors import GradientError
from paceline.replica.buckets import Bucket
from paceline.replica.gradients import Gradients
from paceline.replica.times import BucketTimes


class BucketLanding:
    """Lands buckets one by one, the optimizer stepping with the gradients of each: as they arrive.

    Args:
        optimizer: Updates the parameters of one bucket at a time.
        gradients: Where they come from.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, gradients: Gradients) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._pending: list[Bucket] = []
        self._unused: list[str] = []
        self.unused: list[str] = []
        """Parameters nobody used in the last step that has landed."""
        self._times: list[BucketTimes] = []
        self._settings: list[dict[str, Any]] = []
        self._divisor = 1.0
        self._step = 0

    def begin(self, divisor: float, step: int) -> None:
        """Take on the step's buckets, to land with the optimizer's settings of now."""
        self._pending = list(self._gradients.buckets)
        for bucket in self._pending:
            bucket.drop_gradients()  # the optimizer must see those of one bucket at a time
        self._settings = [_copy_settings(group) for group in self._optimizer.param_groups]
        self._divisor, self._step = divisor, step

    def flush(self) -> set[str]:
        """Land all that is left, and return its parameters."""
        late = {slot.name for bucket in self._pending for slot in bucket.slots}
        self._land_those_of(late)
        return late

    def take_times(self) -> list[BucketTimes]:
        """Return the times of the buckets that have landed since the last call."""
        times, self._times = self._times, []
        return times

    def _land_those_of(self, names: Collection[str]) -> None:
        for bucket in [b for b in self._pending if any(slot.name in names for slot in b.slots)]:
            self._pending.remove(bucket)
            self._land(bucket)

    @torch.no_grad()
    def _land(self, bucket: Bucket) -> None:
        self._unused += self._gradients.land(bucket, self._divisor)
        self._gradients.check_finite([bucket], self._step, may_skip=False)
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        for group, settings in zip(groups, self._settings, strict=True):
            group.update(settings)
        self._optimizer.step()  # only this bucket's parameters have a gradient
        for group, settings in zip(groups, now, strict=True):
            group.update(settings)
        self._times.append(self._gradients.time(bucket))
        bucket.drop_gradients()
        bucket.reset()
        if not self._pending:
            self._gradients.exchanger.commit(self._unused)
            self.unused, self._unused = self._unused, []


class ForwardLanding(BucketLanding):
    """Lands buckets in the next forward, so that the last of them may still be on the wire when it starts.

    The first forward is watched: which module, innermost, uses which parameter. From then on a bucket lands before the
    first module that uses one of its parameters runs, whoever owns it (a tied weight, a parent that reads a child's
    weight). Parameters that were not seen are landed before forward begins. One that is used elsewhere
    later, before it has landed, is found in the backward pass and is an error.

    Args:
        module: The module whose forward is watched.
        parameters: Those that are landed, by name.
        optimizer: Updates them, some at a time.
        gradients: Where they come from.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        gradients: Gradients,
    ) -> None:
        super().__init__(optimizer, gradients)
        self._module = module
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._late: set[str] = set()
        self._handles: list[RemovableHandle] = []
        self.needed: dict[str, int] | None = None
        """Place of each parameter in the order of first use, once a forward has been watched."""

    @property
    def is_possible(self) -> bool:
        """Whether all is learnt that it depends on."""
        return self.needed is not None and not self._gradients.is_learning()

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run forward, landing what it needs as it goes; before evaluation, which may use modules otherwise, all."""
        if not torch.is_grad_enabled():
            self.flush()
            return forward()
        if self.needed is None:
            return self._watch(forward)
        self._land_those_of(set(self._names.values()) - set(self.needed))
        return forward()

    def begin_backward(self) -> None:
        """Land what forward did not need."""
        self._late |= self.flush()

    def close(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def check_backward(self) -> None:
        """Refuse gradients of parameters that landed after the forward pass they are of."""
        used = {slot.name for bucket in self._gradients.buckets for slot in bucket.slots if slot.used}
        stale = sorted(self._late & used)
        self._late = set()
        if stale:
            raise GradientError(
                f"a parameter must be used where its first forward used it, but {stale[0]} was used elsewhere before "
                "its last update had landed; for models whose forward changes from step to step land at the update"
            )

    def _watch(self, forward: Callable[[], Any]) -> Any:
        modules = dict(self._module.named_modules())
        uses: list[tuple[str, str]] = []
        running = [""]
        handles = []
        for name, module in modules.items():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            handles.append(module.register_forward_hook(lambda *_: _pop(running), always_call=True))
        try:
            with _Watcher(self._names, running, uses):
                output = forward()
        finally:
            for handle in handles:
                handle.remove()
        self.needed = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in uses))}
        users: dict[str, set[str]] = {}
        for name, user in uses:
            users.setdefault(user, set()).add(name)
        for user, used in users.items():
            self._handles.append(
                modules[user].register_forward_pre_hook(lambda *_, used=used: self._land_those_of(used), prepend=True)
            )
        return output


def _copy_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group: schedulers may change them, tensors in place, before they are used."""
    settings = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in settings.items()}


def _pop(running: list[str]) -> None:
    running.pop()


class _Watcher(TorchDispatchMode):
    """Notes which module uses which parameter."""

    def __init__(self, names: Mapping[int, str], running: list[str], uses: list[tuple[str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._running = running
        self._uses = uses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs or {})):
            name = self._names.get(id(leaf))
            if name is not None:
                self._uses.append((name, self._running[-1]))
        return func(*args, **(kwargs or {}))
