"""Exchange of one replica's gradients with the other workers."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group, Work
from paceline.errors import NonFiniteError
from paceline.parallel.local import local
from paceline.replica.bucket_size import FIRST_SIZE, SIZES, BucketSizer
from paceline.replica.buckets import Bucket, BucketLauncher, BucketLayout, attach_arrived, make_buckets, plan_layout
from paceline.replica.step_result import BucketTimes, StepTimes
from paceline.sync.reducer import Divisor, FlatBucket, GradientReducer, read_findings
from paceline.sync.tree_reducer import TreeReducer


class Gradients:
    """Buckets of gradients, their launch order, and their exchange.

    The layout is learned in the first step: parameters are laid out in the order in which rank 0's gradients became
    ready. With `bucket_bytes` None the bucket size is chosen after a few more steps (`bucket_size`). All workers agree
    on both. The size stays as it is if the state is read before: sums over three ranks or more depend on the layout,
    and who resumes from that state could not measure the same.

    Args:
        parameters: Parameters that require gradients, by name.
        group: The workers.
        reducer: Reducer that sums buckets over the workers.
        bucket_bytes: Size of a bucket; None to choose it.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], group: Group, reducer: GradientReducer, bucket_bytes: int | None
    ) -> None:
        self.reducer = reducer
        self._parameters = parameters
        self._group = group
        self._bucket_bytes = bucket_bytes or FIRST_SIZE
        self._sizer: BucketSizer | None = None
        self._memory: dict[torch.dtype, Tensor] = {}
        """Memory of the buckets by dtype, the same for all layouts."""
        self._layout_is_learnt = False
        self._ready_order: list[str] = list(reversed(parameters))
        self._divisor: Divisor = lambda: 1.0
        self._step = 0
        self._loss_scale = 1.0
        self.is_eager = True
        """Whether buckets are launched while backward runs; else after it."""
        self.before_launch: Callable[[FlatBucket], None] = lambda bucket: None
        """Function that may change a bucket's gradients just before they are sent."""
        self._use_layout(self._plan(self._bucket_bytes))
        if bucket_bytes is None and self._plan(min(SIZES)) != self._plan(max(SIZES)):
            all_bytes = sum(bucket.flat.buffer.nbytes for bucket in self.buckets)
            share = self.wire_bytes / all_bytes
            self._sizer = BucketSizer(group, {name: share * local(p).nbytes for name, p in parameters.items()})

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All buckets, in launch order."""
        return self._launcher.buckets

    @property
    def wire_bytes(self) -> int:
        """Bytes that this worker sends in a step."""
        return sum(self._wire_bytes)

    @property
    def layout(self) -> BucketLayout:
        """Names of parameters by bucket."""
        return [[slot.name for slot in bucket.slots] for bucket in self._launcher.buckets]

    def arm(self, divisor: Divisor, step: int, loss_scale: float, *, repeats: bool = False) -> None:
        """Launch buckets during the next backward pass, or after it if it `repeats` gradients, which add up.

        For the other arguments see `GradientReducer.reduce`.
        """
        self._divisor, self._step, self._loss_scale = divisor, step, loss_scale
        self._launcher.arm(is_eager=self.is_eager and not repeats)

    def collect(self) -> None:
        """Collect gradients that were computed without the hooks, as in pipeline stages."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.parameter.grad is not None:
                    slot.attach()

    def keep(self) -> None:
        """Keep the gradients of a virtual worker, and let the next one's begin anew."""
        assert isinstance(self.reducer, TreeReducer)
        for bucket in self.buckets:
            for slot in bucket.slots:
                if not slot.used:
                    slot.view.zero_()
            self.reducer.keep(bucket.flat)
            bucket.drop_gradients()

    def finish(self) -> None:
        """Launch the remaining buckets after the backward pass."""
        self._launcher.finish()
        for bucket in self.buckets:
            bucket.hide_gradients()

    def receive(self, buckets: Sequence[Bucket], divisor: float) -> list[str]:
        """Wait for buckets, give their gradients to the parameters, and return the parameters that no rank used."""
        for bucket in buckets:
            began_s = time.perf_counter()
            assert bucket.work is not None
            bucket.work.wait()
            bucket.landed_s = time.perf_counter()
            bucket.waited_s = bucket.landed_s - began_s
            self.reducer.finalize(bucket.flat, divisor)
        return attach_arrived(buckets)

    def check_finite(self, buckets: Sequence[Bucket], step: int, *, may_skip: bool) -> None:
        """Refuse gradients that an exchange found to be not finite.

        Args:
            buckets: Buckets that have arrived.
            step: Number of updates before this step.
            may_skip: Whether loss scaling skips such a step; a gradient is then set to infinity for it.

        Raises:
            NonFiniteError: Some gradients are not finite; the message says where.
        """
        if all(bucket.flat.findings is None for bucket in buckets):
            return
        found = read_findings(bucket.flat for bucket in buckets)
        bad = [(bucket, num) for bucket, (num, is_finite) in zip(buckets, found, strict=True) if num or not is_finite]
        if not bad:
            return
        self.reducer.roll_back()
        if may_skip:
            for bucket, _ in bad:
                # The whole buffer: a parameter that no rank used has no gradient in which infinity would be seen.
                bucket.flat.numerators.fill_(torch.inf)
            return
        first, last = bad[0][0].slots[0].name, bad[-1][0].slots[-1].name
        num_ranks = max(num for _, num in bad)
        where = f"on {num_ranks} of {self._group.size} ranks" if num_ranks else "in the sum over ranks"
        raise NonFiniteError(
            f"gradients must be finite, but at step {step} some between {first} and {last} are not, {where}, while the "
            "loss is; lower the learning rate, or look at that step's data"
        )

    def time(self, bucket: Bucket) -> BucketTimes:
        """Return the times of a received bucket, by `time.perf_counter`."""
        assert bucket.work is not None
        return BucketTimes(
            index=bucket.index,
            parameters=[slot.name for slot in bucket.slots],
            num_bytes=bucket.flat.buffer.nbytes,
            wire_bytes=self._wire_bytes[bucket.index],
            ready_s=bucket.ready_s,
            began_s=bucket.work.began_s or bucket.ready_s,
            ended_s=bucket.work.ended_s or bucket.landed_s,
            landed_s=bucket.landed_s,
            waited_s=bucket.waited_s,
        )

    def drop(self) -> None:
        """Take off the parameters the gradients of another loss, such as that of the other network of a GAN."""
        for bucket in self.buckets:
            bucket.drop_gradients()
            for slot in bucket.slots:
                slot.used = False

    def reset(self) -> None:
        """Prepare for the next step."""
        for bucket in self.buckets:
            bucket.drop_gradients()
            bucket.reset()

    def is_learning(self) -> bool:
        """Return whether layout or bucket size may still change."""
        return not self._layout_is_learnt or self._sizer is not None

    def adapt_layout(self, times: StepTimes) -> None:
        """Adapt layout and bucket size after a step. Every rank calls it at the same step."""
        if not self._layout_is_learnt:
            order: list[str] = self._group.gather_documents(list(self._launcher.ready_s), name="ready order")[0]
            self._layout_is_learnt = True
            self._ready_order = order + [name for name in reversed(self._parameters) if name not in set(order)]
            self._change_layout(self._plan(self._bucket_bytes))
        elif self._sizer is not None:
            ready_s = self._launcher.ready_s if self.is_eager else {}
            if not self._sizer.measure(times.buckets, ready_s, self._launcher.launches_s):
                return
            choice = self._sizer.agree(self._plan)
            self._sizer = None
            if choice is not None:
                times.bucket_choice = choice
                self._bucket_bytes = choice.bucket_bytes
                if (layout := self._plan(choice.bucket_bytes)) != self.layout:
                    self._change_layout(layout)

    def state_dict(self) -> dict[str, Any]:
        """Return the layout, as JSON; a size that is still to be chosen stays as it is from now on."""
        if self._sizer is not None:
            self._sizer.keeps = True
        return {"layout": self.layout, "is_learnt": self._layout_is_learnt}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use a saved layout, since sums over three ranks or more depend on it."""
        layout = state["layout"]
        if {name for names in layout for name in names} == set(self._parameters):
            self._layout_is_learnt = state["is_learnt"]
            self._sizer = None
            self._ready_order = [name for names in layout for name in names]
            self._change_layout(layout)

    def close(self) -> None:
        """Remove the hooks from the parameters and close connections."""
        self._launcher.close()
        self.reducer.close()
        self._memory.clear()

    def _launch(self, bucket: Bucket) -> Work:
        self.before_launch(bucket.flat)
        return self.reducer.reduce(bucket.flat, self._divisor, self._step, self._loss_scale)

    def _plan(self, bucket_bytes: int) -> BucketLayout:
        return plan_layout(self._parameters, self._ready_order, bucket_bytes)

    def _change_layout(self, layout: BucketLayout) -> None:
        self._launcher.close()
        self._use_layout(layout)

    def _use_layout(self, layout: BucketLayout) -> None:
        buckets = make_buckets(self._parameters, layout, self._group, self._memory)
        self.reducer.begin_layout([bucket.flat for bucket in buckets])
        self._launcher = BucketLauncher(buckets, self._launch)
        self._wire_bytes = [self.reducer.wire_bytes(bucket.flat) for bucket in buckets]
