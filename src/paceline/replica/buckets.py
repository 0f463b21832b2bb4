"""Flat buffers that gradients live in, and the order in which they leave."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.comm.group import Group, Work
from paceline.errors import GradientError
from paceline.parallel.local import local, wrap
from paceline.parallel.model_shard import summed_gradient
from paceline.sync.reducer import FlatBucket

BucketLayout = list[list[str]]
"""Parameter names by bucket, in launch order. Sums over three ranks or more depend on it, so checkpoints hold it."""


FIRST_BUCKET_BYTES = 2**20
"""Size of the first bucket: smaller, so that a slow network starts early in the backward pass."""


def plan_layout(parameters: Mapping[str, nn.Parameter], order: Iterable[str], bucket_bytes: int) -> BucketLayout:
    """Return buckets of about `bucket_bytes`, the first smaller, that take parameters in `order`, each of one dtype."""
    layout: BucketLayout = []
    open_buckets: dict[torch.dtype, list[str]] = {}
    filled: dict[torch.dtype, int] = {}
    for name in order:
        dtype, size = parameters[name].dtype, local(parameters[name]).nbytes
        largest = min(bucket_bytes, FIRST_BUCKET_BYTES) if len(layout) == 1 else bucket_bytes
        if dtype not in open_buckets or filled[dtype] + size > largest:
            open_buckets[dtype] = []
            layout.append(open_buckets[dtype])
            filled[dtype] = 0
        open_buckets[dtype].append(name)
        filled[dtype] += size
    return layout


class SentGradient(Tensor):
    """A gradient that is on its way to the other workers: who reads or changes it would do so in vain."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse.

        Raises:
            GradientError: Always.
        """
        raise GradientError(
            "gradients must be left alone between replica.backward and replica.update, since they are on their way to "
            f"the other workers, but {getattr(func, '__name__', func)} was called with one; to clip them give Replica "
            "clip_norm, or change them in a pre-hook of the optimizer (register_step_pre_hook); for their norm read "
            "gradient_norm of what update returns"
        )


class SentPart(DTensor):
    """A rank's part of such a gradient."""

    __torch_function__ = SentGradient.__torch_function__


@dataclass
class Slot:
    """One parameter's place in a bucket."""

    name: str
    parameter: nn.Parameter
    view: Tensor
    """Part of the buffer that holds this rank's gradient of the parameter."""
    gradient: Tensor
    """The view as the parameter's ``.grad``: the same, except for a parameter that ranks share."""
    bucket: "Bucket"
    sent: Tensor | None
    """The parameter's ``.grad`` while the bucket is under way, which refuses every use; None for other subclasses."""
    used: bool = False
    """Whether the parameter has had a gradient since the last update."""
    fired: bool = False
    """Whether the parameter has had a gradient in the backward pass during which buckets are launched."""
    hidden: bool = False
    """Whether the parameter's ``.grad`` is `sent`, unless the training loop has set it to None."""
    dropped: bool = False
    """Whether the training loop has set it to None, so that the optimizer leaves the parameter alone."""

    def note_dropped(self) -> None:
        """Note whether the training loop has set the gradient to None since it was sent."""
        self.dropped |= self.hidden and self.parameter.grad is None
        self.hidden = False

    def attach(self) -> None:
        """Make autograd's gradient the view, whatever ``zero_grad`` did to it."""
        self.used = True
        if self.parameter.grad is self.gradient:
            return
        gradient = summed_gradient(self.parameter)
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise GradientError(
                f"the gradient of {self.name} must be dense, but got {gradient.layout}; "
                "build its embedding with sparse=False"
            )
        self.view.copy_(gradient if type(gradient) is Tensor else local(gradient))
        self.parameter.grad = self.gradient


@dataclass
class Bucket:
    """One flat buffer: the gradients of some parameters, and the state of their exchange.

    A flag per parameter travels with the gradients, so that the sum tells every rank which parameters no rank used.
    """

    index: int
    flat: FlatBucket
    slots: list[Slot] = field(default_factory=list)
    num_fired: int = 0
    work: Work | None = None
    """Exchange of the bucket, once it was launched."""
    ready_s: float = 0.0
    """Time at which its gradients were complete, by `time.perf_counter`."""
    waited_s: float = 0.0
    """Time that the worker waited for the bucket."""
    landed_s: float = 0.0

    def reset(self) -> None:
        """Prepare for the next step."""
        self.num_fired = 0
        self.work = None
        self.flat.flags.fill_(1)
        self.flat.findings = None
        for slot in self.slots:
            slot.used = slot.fired = slot.hidden = slot.dropped = False

    def hide_gradients(self) -> None:
        """Put in the place of gradients that are on their way what no code can read or change by mistake."""
        for slot in self.slots:
            if slot.sent is not None and slot.parameter.grad is slot.gradient:
                slot.parameter.grad, slot.hidden = slot.sent, True

    def clear_unused(self) -> None:
        """Zero the gradients that the step's backward passes did not write, and mark them in the flags."""
        for number, slot in enumerate(self.slots):
            if not slot.used:
                slot.view.zero_()
                self.flat.flags[number] = 0

    def drop_gradients(self) -> None:
        """Remove the gradients from the parameters."""
        for slot in self.slots:
            slot.note_dropped()
            slot.parameter.grad = None


def attach_arrived(buckets: Sequence[Bucket]) -> list[str]:
    """Give each parameter the gradient that arrived, and return the parameters that no rank used: they get none.

    A parameter that only other ranks used gets their gradient. To know them, the host waits once for all buckets. One
    whose gradient the training loop has set to None since it was sent gets none, and is not returned.
    """
    asked = [bucket for bucket in buckets if not all(slot.used for slot in bucket.slots)]
    flags = iter(torch.cat([bucket.flat.flags.float() for bucket in asked]).tolist() if asked else ())
    unused = []
    for bucket in buckets:
        is_asked = any(bucket is one for one in asked)
        for slot in bucket.slots:
            slot.note_dropped()
            is_used = not is_asked or bool(next(flags))
            slot.parameter.grad = slot.gradient if is_used and not slot.dropped else None
            unused += [] if is_used else [slot.name]
    return unused


def make_buckets(
    parameters: Mapping[str, nn.Parameter], layout: BucketLayout, group: Group, memory: dict[torch.dtype, Tensor]
) -> list[Bucket]:
    """Return buckets of the given `layout`; the group allocates their buffers, so that it need not copy them.

    Args:
        parameters: Parameters by name.
        layout: Names of parameters by bucket.
        group: The workers.
        memory: Allocations of the layout before by dtype, which is used no more; empty at first. All layouts of the
            same parameters take as much, so that they are made once: 50 MB cost as much time as several steps.
    """
    buckets = []
    buffers = _allocate(parameters, layout, group, memory)
    for index, (names, buffer) in enumerate(zip(layout, buffers, strict=True)):
        sizes = [local(parameters[name]).numel() for name in names]
        chunks = buffer[: sum(sizes)].split(sizes)
        # Gradients take the strides of their parameter, otherwise every optimizer step would have to reorder them.
        views = {name: _view_as(chunk, local(parameters[name])) for name, chunk in zip(names, chunks, strict=True)}
        bucket = Bucket(index, FlatBucket(f"bucket {index}", buffer, views))
        for name, view in views.items():
            gradient = wrap(parameters[name], view)
            bucket.slots.append(Slot(name, parameters[name], view, gradient, bucket, _hide(view, gradient)))
        buckets.append(bucket)
    return buckets


def _hide(view: Tensor, gradient: Tensor) -> Tensor | None:
    if isinstance(gradient, DTensor):
        return SentPart(gradient._local_tensor, gradient._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return view.as_subclass(SentGradient) if type(gradient) is Tensor else None


def _allocate(
    parameters: Mapping[str, nn.Parameter], layout: BucketLayout, group: Group, memory: dict[torch.dtype, Tensor]
) -> list[Tensor]:
    """Return a buffer for each bucket's gradients and flags.

    Buffers of a dtype are parts of one allocation, on which all ranks must agree each time.
    """
    sizes = [sum(local(parameters[name]).numel() for name in names) + len(names) for names in layout]
    dtypes = [parameters[names[0]].dtype for names in layout]
    buffers: list[Tensor] = [torch.empty(0)] * len(layout)
    for dtype in dict.fromkeys(dtypes):
        places = [place for place, other in enumerate(dtypes) if other == dtype]
        starts = [0, *accumulate(sizes[place] for place in places)]
        if dtype in memory:
            whole = memory[dtype].zero_()
        else:
            whole = memory[dtype] = group.allocate(starts[-1], dtype)
        for place, start in zip(places, starts, strict=False):
            buffers[place] = whole[start : start + sizes[place]]
    return buffers


class BucketLauncher:
    """Launches each bucket when its last gradient is ready, while backward continues.

    All ranks launch buckets in the same order, whatever order they become ready in: ranks with different
    launch orders would sum different buckets.

    Args:
        buckets: The buckets of a layout.
        launch: Function that starts the exchange of a bucket.
    """

    def __init__(self, buckets: Sequence[Bucket], launch: Callable[[Bucket], Work]) -> None:
        self.buckets = list(buckets)
        self.ready_s: dict[str, float] = {}
        """Time at which the last armed backward pass made each gradient, by parameter, in that order."""
        self.launches_s: list[float] = []
        """Time that each launch of the last armed backward pass took."""
        self._launch = launch
        self._armed = self._is_eager = False
        self._next = 0
        slots = [slot for bucket in buckets for slot in bucket.slots]
        self._hooks = [slot.parameter.register_post_accumulate_grad_hook(self._make_hook(slot)) for slot in slots]
        for bucket in buckets:
            bucket.reset()

    def arm(self, *, is_eager: bool = True) -> None:
        """Launch buckets during the next backward pass, or after it without `is_eager`."""
        self._armed, self._is_eager = True, is_eager
        self._next = 0
        self.ready_s, self.launches_s = {}, []

    def finish(self) -> None:
        """Launch the remaining buckets after the backward pass: those with parameters that it did not use."""
        now_s = time.perf_counter()
        for bucket in self.buckets:
            bucket.clear_unused()
            if bucket.num_fired < len(bucket.slots):
                bucket.ready_s = now_s
        self._launch_until(lambda bucket: True)
        self._armed = False

    def close(self) -> None:
        """Remove the hooks from the parameters and release the buckets: hooks and slots refer to each other."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for bucket in self.buckets:
            bucket.slots.clear()
        self.buckets = []
        self._launch = _launch_no_more

    def _make_hook(self, slot: Slot) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if slot.fired and (self._is_eager or slot.bucket.work is not None):
                raise GradientError(
                    f"the gradient of {slot.name} must be made once before update, but it was made twice; use "
                    "non-reentrant activation checkpointing, pass last=False to all but the last backward, or call "
                    "update before another loss goes back through the module"
                )
            slot.attach()
            if not self._armed or slot.fired:
                return
            slot.fired = True
            self.ready_s[slot.name] = now_s = time.perf_counter()
            bucket = slot.bucket
            bucket.num_fired += 1
            if bucket.num_fired == len(bucket.slots):
                bucket.ready_s = now_s
                if self._is_eager:
                    self._launch_until(lambda bucket: bucket.num_fired == len(bucket.slots))

        return hook

    def _launch_until(self, is_ready: Callable[[Bucket], bool]) -> None:
        while self._next < len(self.buckets) and is_ready(self.buckets[self._next]):
            bucket = self.buckets[self._next]
            began_s = time.perf_counter()
            bucket.work = self._launch(bucket)
            self.launches_s.append(time.perf_counter() - began_s)
            self._next += 1


def _view_as(chunk: Tensor, parameter: Tensor) -> Tensor:
    if _is_dense(parameter):
        return chunk.as_strided(parameter.shape, parameter.stride())
    return chunk.view_as(parameter)


def _is_dense(parameter: Tensor) -> bool:
    """Return whether the strides visit each element once and leave no gap."""
    expected = 1
    for size, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda dim: dim[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _launch_no_more(bucket: Bucket) -> Work:
    raise AssertionError(f"bucket {bucket.index} must be launched before its launcher is closed")
