"""Flat buffers that gradients live in, and the order in which they leave."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.comm.group import Group, Work
from paceline.errors import GradientError

Layout = list[list[str]]
"""Parameter names by bucket, in launch order. Sums of three ranks and more depend on it, so checkpoints hold it."""


def plan_layout(parameters: Mapping[str, nn.Parameter], order: Iterable[str], bucket_bytes: int) -> Layout:
    """Return buckets of about `bucket_bytes` that take the parameters in `order`, each of one dtype."""
    layout: Layout = []
    open_buckets: dict[torch.dtype, list[str]] = {}
    filled: dict[torch.dtype, int] = {}
    for name in order:
        dtype, size = parameters[name].dtype, parameters[name].nbytes
        if dtype not in open_buckets or filled[dtype] + size > bucket_bytes:
            open_buckets[dtype] = []
            layout.append(open_buckets[dtype])
            filled[dtype] = 0
        open_buckets[dtype].append(name)
        filled[dtype] += size
    return layout


@dataclass
class Slot:
    """One parameter's place in a bucket."""

    name: str
    parameter: nn.Parameter
    view: Tensor
    """The part of the buffer that is the parameter's ``.grad``."""
    bucket: "Bucket"
    used: bool = False
    """Whether it has had a gradient since the last update."""
    fired: bool = False
    """Whether it has had one in the backward pass that gradients leave in."""

    def attach(self) -> None:
        """Make the gradient that autograd left the view, whatever ``zero_grad`` did to it."""
        gradient = self.parameter.grad
        self.used = True
        if gradient is self.view:
            return
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise GradientError(
                f"the gradient of {self.name} must be dense, but got {gradient.layout}; "
                "build its embedding with sparse=False"
            )
        self.view.copy_(gradient)
        self.parameter.grad = self.view


@dataclass
class Bucket:
    """One flat buffer: the gradients of some parameters, then one element a parameter that says whether it was used.

    Usage travels with the gradients, so that the sum tells every rank which parameters nobody used.
    """

    index: int
    buffer: Tensor
    slots: list[Slot] = field(default_factory=list)
    num_fired: int = 0
    work: Work | None = None

    @property
    def flags(self) -> Tensor:
        """The usage elements at the buffer's end, one a slot."""
        return self.buffer[len(self.buffer) - len(self.slots) :]

    @property
    def numerators(self) -> Tensor:
        """The gradients' part of the buffer."""
        return self.buffer[: len(self.buffer) - len(self.slots)]


def make_buckets(parameters: Mapping[str, nn.Parameter], layout: Layout, group: Group) -> list[Bucket]:
    """Return buckets of the given `layout`; their buffers are the group's, so that it need not copy them."""
    buckets = []
    for index, names in enumerate(layout):
        sizes = [parameters[name].numel() for name in names]
        bucket = Bucket(index, group.allocate(sum(sizes) + len(names), parameters[names[0]].dtype))
        pieces = bucket.buffer[: sum(sizes)].split(sizes)
        for name, piece in zip(names, pieces, strict=True):
            parameter = parameters[name]
            # Gradients take the strides of their parameter, or every optimizer step would have to reorder them.
            view = (
                piece.as_strided(parameter.shape, parameter.stride())
                if _is_dense(parameter)
                else piece.view_as(parameter)
            )
            bucket.slots.append(Slot(name, parameter, view, bucket))
        buckets.append(bucket)
    return buckets


class Reducer:
    """Launches each bucket when the last of its gradients is ready, while backward goes on.

    Buckets leave in the order of their layout on every rank, whatever order they become ready in here: ranks that
    launched in orders of their own would sum different buckets.
    """

    def __init__(self, buckets: Sequence[Bucket], launch: Callable[[Bucket], Work]) -> None:
        self.buckets = buckets
        self.ready_order: list[str] = []
        self._launch = launch
        self._armed = False
        self._next = 0
        slots = [slot for bucket in buckets for slot in bucket.slots]
        self._hooks = [slot.parameter.register_post_accumulate_grad_hook(self._make_hook(slot)) for slot in slots]

    def arm(self) -> None:
        """Let buckets leave in the backward pass that comes."""
        self._armed = True

    def finish(self) -> None:
        """Launch what is left after the backward pass: buckets with parameters that it did not use."""
        for bucket in self.buckets:
            for number, slot in enumerate(bucket.slots):
                if not slot.used:
                    slot.view.zero_()
                    bucket.flags[number] = 0
        self._launch_until(lambda bucket: True)

    def reset(self) -> None:
        """Make ready for the next step."""
        for bucket in self.buckets:
            bucket.num_fired = 0
            bucket.work = None
            bucket.flags.fill_(1)
            for slot in bucket.slots:
                slot.used = slot.fired = False
        self._armed = False
        self._next = 0

    def find_unused(self) -> list[str]:
        """Return the parameters that no rank used, once all buckets have arrived; their gradient becomes None.

        A parameter that only other ranks used gets the gradient they sent.
        """
        unused = []
        for bucket in self.buckets:
            if all(slot.used for slot in bucket.slots):
                continue
            for slot, flag in zip(bucket.slots, bucket.flags.tolist(), strict=True):
                slot.parameter.grad = slot.view if flag else None
                if not flag:
                    unused.append(slot.name)
        return unused

    def close(self) -> None:
        """Take the hooks off the parameters and let the buffers go: hooks and slots refer to each other in a ring."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for bucket in self.buckets:
            bucket.slots.clear()
        self.buckets = ()

    def _make_hook(self, slot: Slot) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            slot.attach()
            if not self._armed:
                return
            if slot.fired:
                raise GradientError(
                    f"the gradient of {slot.name} must be made once in a backward pass, but it was made twice; "
                    "use non-reentrant activation checkpointing, or pass last=False to all but the last backward"
                )
            slot.fired = True
            self.ready_order.append(slot.name)
            slot.bucket.num_fired += 1
            self._launch_until(lambda bucket: bucket.num_fired == len(bucket.slots))

        return hook

    def _launch_until(self, is_ready: Callable[[Bucket], bool]) -> None:
        while self._next < len(self.buckets) and is_ready(self.buckets[self._next]):
            bucket = self.buckets[self._next]
            bucket.work = self._launch(bucket)
            self._next += 1


def _is_dense(parameter: Tensor) -> bool:
    """Return whether the strides visit each element once and leave no hole."""
    expected = 1
    for size, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda dim: dim[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
