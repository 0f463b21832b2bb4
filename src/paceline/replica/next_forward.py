"""Landing in the next forward: each bucket just before its parameters are used, the most urgent sent first.

It pays on slow links: forward begins while the last buckets are still in transit. ByteScheduler (Peng et al., SOSP
2019) and P3 (Jayarajan et al., MLSys 2019) send first the buckets that the next forward needs first. They decide as
gradients become ready, each worker alone or by a central scheduler; here the order is computed once from one worker's
measurements and shared, since workers with different launch orders would sum different buckets. The moment at which a
gradient is applied does not change the result.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from paceline.comm.channel import Channel
from paceline.comm.group import Group, Work
from paceline.errors import GradientError
from paceline.replica.landing import BucketLanding
from paceline.replica.step_result import BucketTimes
from paceline.sync.reducer import Divisor, FlatBucket, GradientReducer
from paceline.sync.rule import Rule

CHUNK_BYTES = 4 * 2**20
"""Largest part of a bucket for which a more urgent one may have to wait: 34 ms at 1 Gbit/s."""
_MEASURED_STEPS = 3
"""Number of measured steps from which the launch order is computed."""


class ForwardLanding(BucketLanding):
    """Applies buckets in the next forward, so that the last of them may still be in transit when it starts.

    The first forward records which innermost module uses which parameter. From then on a bucket is applied before the
    first module that uses one of its parameters runs, whichever module owns it (a tied weight, a parent that reads a
    child's weight). Parameters that were not recorded are updated before forward begins. A parameter that is later used
    elsewhere, before its update is applied, is found in the backward pass and raises an error.

    Args:
        optimizer: Optimizer, which updates the parameters of one bucket at a time.
        rule: Synchronisation rule, which makes the reducer of buckets.
        module: Module whose forward is recorded.
        parameters: Parameters to update, by name.
    """

    delay = 1

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__(optimizer, rule)
        self._module = module
        self._reducer: PriorityReducer | None = None
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._late: set[str] = set()
        self._handles: list[RemovableHandle] = []
        self.needed: dict[str, int] | None = None
        """Place of each parameter in the order of first use, once a forward has been recorded."""

    @property
    def is_ready(self) -> bool:
        """Whether all is learnt that it depends on."""
        is_learning = self.gradients.is_learning() or self._reducer is None or self._reducer.is_measuring
        return self.needed is not None and not is_learning

    def start_reducer(self, group: Group, seed: int = 0, *, step: int = 0) -> GradientReducer:
        """Return what exchanges buckets in chunks, the most urgent first."""
        own = group.duplicate("most urgent first")
        self._reducer = PriorityReducer(self._rule.start_reducer(own, seed, step=step), own)
        return self._reducer

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run forward; each bucket is applied when it is needed, all before evaluation, which may use other modules."""
        if not torch.is_grad_enabled():
            self.flush()
            return forward()
        if self.needed is None:
            return self._watch(forward)
        self.land_those_of(set(self._names.values()) - set(self.needed))
        return forward()

    def begin_backward(self) -> None:
        """Apply the buckets that forward did not need."""
        self._late |= self.flush()

    def land(self, divisor: float, step: int) -> list[BucketTimes]:
        """Accept the step's buckets for the next forward, and return the times of those applied since."""
        self.begin(divisor, step)
        return self.take_times()

    def end_step(self) -> None:
        """Measure the times of exchanges, once nothing else changes, and agree on their order."""
        if self._reducer is not None and not self.gradients.is_learning():
            # A worker without a forward so far must measure in the same steps as the others.
            self._reducer.end_step(self.needed or {})

    def close(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def end_backward(self) -> None:
        """Refuse gradients of parameters that were updated after their forward pass."""
        used = {slot.name for bucket in self.gradients.buckets for slot in bucket.slots if slot.used}
        stale = sorted(self._late & used)
        self._late = set()
        if stale:
            raise GradientError(
                f"a parameter must be used where its first forward used it, but {stale[0]} was used elsewhere before "
                "its last update was applied; for a model whose forward changes from step to step leave landing out"
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
                modules[user].register_forward_pre_hook(lambda *_, used=used: self.land_those_of(used), prepend=True)
            )
        return output


def _pop(running: list[str]) -> None:
    running.pop()


class _Watcher(TorchDispatchMode):
    """Records which module uses which parameter."""

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


class PriorityReducer(GradientReducer):
    """Exchanges buckets in chunks, in the order in which the next forward needs them, as far as they are ready.

    Args:
        reducer: Reducer of a chunk; if it only takes whole buckets, a bucket is one chunk.
        group: The workers; a group for this reducer only, which closes it.
    """

    def __init__(self, reducer: GradientReducer, group: Group) -> None:
        self._inner, self._group = reducer, group
        # One chunk at a time; otherwise the group would share the bandwidth among all.
        self._channel = Channel("paceline-priority") if reducer.can_split else None
        self.bucket_bytes, self.state_of = reducer.bucket_bytes, reducer.state_of
        self.is_measuring = True
        self._buckets: list[FlatBucket] = []
        self._order: list[int] = []
        self._next = 0
        self._begun: dict[int, _Begun] = {}
        self._measured: list[tuple[list[float], list[float]]] = []

    def begin_layout(self, buckets: Sequence[FlatBucket]) -> None:
        """Exchange these buckets from now on, with a new measurement of their order."""
        self._buckets = list(buckets)
        self._order = [number for number, bucket in enumerate(buckets) for _ in range(self._count_chunks(bucket))]
        self._next, self._begun, self._measured, self.is_measuring = 0, {}, [], True

    def reduce(self, bucket: FlatBucket, divisor: Divisor, step: int, loss_scale: float = 1.0) -> Work:
        """Start the chunks that are ready and next in order; the other chunks follow in their turn."""
        number = next(number for number, one in enumerate(self._buckets) if one is bucket)
        if self._next == len(self._order):
            self._next, self._begun = 0, {}
        begun = self._begun[number] = _Begun(time.perf_counter(), _Chunks())
        chunks = bucket.buffer.tensor_split(self._count_chunks(bucket))

        def start(chunk: int) -> Work:
            if self._channel is None:
                return self._inner.reduce(bucket, divisor, step, loss_scale)
            part = FlatBucket(f"{bucket.name} chunk {chunk}", chunks[chunk], {})
            return self._channel.submit(lambda: self._inner.reduce(part, divisor, step, loss_scale).wait())

        begun.start = start
        while self._next < len(self._order) and (turn := self._begun.get(self._order[self._next])) is not None:
            assert turn.start is not None
            turn.chunks.works.append(turn.start(len(turn.chunks.works)))
            self._next += 1
        return begun.chunks

    def end_step(self, needed: Mapping[str, int]) -> None:
        """Record the times of a step; after a few steps, all workers agree on an order.

        Args:
            needed: Place of each parameter in the order in which forward uses them.
        """
        if not self.is_measuring:
            return
        chunks = [
            (begun.ready_s, work)
            for number in range(len(self._buckets))
            for begun in [self._begun[number]]
            for work in begun.chunks.works
        ]
        # Exchanges that share the bandwidth each take as many times longer; the order is planned for one at a time.
        took_s = [((work.ended_s or 0.0) - (work.began_s or 0.0)) / self._inner.max_in_flight for _, work in chunks]
        self._measured.append(([ready_s for ready_s, _ in chunks], took_s))
        first = min(self._measured[-1][0])
        self._measured[-1] = ([ready_s - first for ready_s in self._measured[-1][0]], took_s)
        if len(self._measured) < _MEASURED_STEPS:
            return
        ready_s, duration_s = (
            [sorted(values)[_MEASURED_STEPS // 2] for values in zip(*column, strict=True)]
            for column in zip(*self._measured, strict=True)
        )
        last = len(needed)
        owners = [number for number, bucket in enumerate(self._buckets) for _ in range(self._count_chunks(bucket))]
        places = [min(needed.get(name, last) for name in self._buckets[number].blocks) for number in owners]
        order = [owners[chunk] for chunk in plan_launch_order(ready_s, duration_s, places)]
        self._order = self._group.gather_documents(order, name="launch order")[0]
        self.is_measuring = False

    def _count_chunks(self, bucket: FlatBucket) -> int:
        return -(-bucket.buffer.nbytes // CHUNK_BYTES) if self._channel is not None else 1

    def finalize(self, bucket: FlatBucket, divisor: float) -> None:
        """See the chunk's reducer."""
        self._inner.finalize(bucket, divisor)

    def commit(self, unused: Collection[str]) -> None:
        """See the chunk's reducer."""
        self._inner.commit(unused)

    def roll_back(self) -> None:
        """See the chunk's reducer."""
        self._inner.roll_back()

    def state(self) -> dict[str, Tensor]:
        """Return the state of the chunk's reducer."""
        return self._inner.state()

    def detached_state(self, shapes: Mapping[str, Size]) -> dict[str, Tensor]:
        """See the chunk's reducer."""
        return self._inner.detached_state(shapes)

    def load_state(self, saved: list[dict[str, Tensor]], shapes: Mapping[str, Size]) -> None:
        """See the chunk's reducer."""
        self._inner.load_state(saved, shapes)

    def wire_bytes(self, bucket: FlatBucket) -> int:
        """Return the bytes of a whole bucket."""
        return self._inner.wire_bytes(bucket)

    def close(self) -> None:
        """Close connections and threads."""
        if self._channel is not None:
            self._channel.close()
        self._inner.close()
        self._group.close()


class _Chunks(Work):
    """The exchanges of a bucket's chunks."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self.works:
            work.wait()
        self.began_s = min((work.began_s for work in self.works if work.began_s), default=None)
        self.ended_s = max((work.ended_s for work in self.works if work.ended_s), default=None)


@dataclass
class _Begun:
    """A bucket that is ready, and the state of its chunks."""

    ready_s: float
    chunks: _Chunks
    start: Callable[[int], Work] | None = None


def plan_launch_order(ready_s: Sequence[float], duration_s: Sequence[float], needed: Sequence[int]) -> list[int]:
    """Return the best order in which to exchange the buckets, one at a time.

    Whenever the network is free, it takes the ready bucket that forward needs first: waiting for
    a more urgent one that is not ready yet would leave the network idle.

    Args:
        ready_s: Time at which each bucket's gradients are complete, from the beginning of backward.
        duration_s: Duration of each bucket's exchange.
        needed: Place of each bucket in the order in which forward needs them.
    """
    waiting = set(range(len(ready_s)))
    order: list[int] = []
    now_s = 0.0
    while waiting:
        now_s = max(now_s, min(ready_s[bucket] for bucket in waiting))
        chosen = min((b for b in waiting if ready_s[b] <= now_s), key=lambda bucket: (needed[bucket], bucket))
        waiting.remove(chosen)
        order.append(chosen)
        now_s += duration_s[chosen]
    return order
