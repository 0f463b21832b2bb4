"""The reducer with which a new codec begins: what the codec before it held back is sent with its first sums."""

from collections.abc import Collection, Mapping, Sequence

from torch import Size, Tensor

from paceline.comm.group import Group, Work
from paceline.compression.codec import Codec
from paceline.sync.reducer import Divisor, FlatBucket, GradientReducer
from paceline.sync.reducers import of_block


class CarryingReducer(GradientReducer):
    """Adds the residuals of another codec to the first values that are summed, so that none is lost.

    Over the change, what was applied and what is still held back add up to what was computed. Until a step with the
    residuals has succeeded on all workers, its state is that of the codec before: a checkpoint in between loses nothing
    either.

    Args:
        inner: Reducer that sums from now on.
        group: Group of the workers.
        before: Codec whose residuals are carried; it has encoded the same kind of values.
        states: State of each block under the codec before, by `<block>/<site>`.
    """

    def __init__(self, inner: GradientReducer, group: Group, before: Codec, states: Mapping[str, Tensor]) -> None:
        self._inner = inner
        self.carried: Codec | None = before
        """Codec before, as long as its residuals have not been sent."""
        self.timed = inner.timed
        self._rank, self._size = group.rank, group.size
        self.bucket_bytes, self.max_in_flight, self.can_split = inner.bucket_bytes, inner.max_in_flight, inner.can_split
        self.state_of = before.name
        self._states = dict(states)

    def reduce(self, bucket: FlatBucket, divisor: Divisor, step: int, loss_scale: float = 1.0) -> Work:
        """Add the residuals, in the first step, and start to sum."""
        if self.carried is not None:
            for number, (block, view) in enumerate(bucket.blocks.items()):
                residual = self.carried.residual(of_block(self._states, block), view.shape, self._rank, self._size)
                if residual is not None:
                    view.add_((residual * (divisor() * loss_scale)).to(view.dtype))
                    bucket.flags[number] = 1  # also a parameter that no rank used gets what is held back of it
        return self._inner.reduce(bucket, divisor, step, loss_scale)

    def begin_layout(self, buckets: Sequence[FlatBucket]) -> None:
        """Set the buckets."""
        self._inner.begin_layout(buckets)

    def finalize(self, bucket: FlatBucket, divisor: float) -> None:
        """Make the sums means."""
        self._inner.finalize(bucket, divisor)

    def commit(self, unused: Collection[str]) -> None:
        """Keep the new state, and drop the residuals, which have been sent."""
        self._inner.commit(unused)
        self.carried, self._states, self.state_of = None, {}, self._inner.state_of

    def roll_back(self) -> None:
        """Keep the state before this step."""
        self._inner.roll_back()

    def state(self) -> dict[str, Tensor]:
        """Return the state of the codec before, until its residuals are sent."""
        return dict(self._states) if self.carried is not None else self._inner.state()

    def load_state(self, saved: list[dict[str, Tensor]], shapes: Mapping[str, Size]) -> None:
        """Load the state of the codec before, which is still to be sent."""
        assert self.carried is not None
        for block, shape in shapes.items():
            by_worker = [of_block(tensors, block) for tensors in saved]
            if any(by_worker):
                kept = self.carried.resize(by_worker, shape, self._rank, self._size)
                self._states |= {f"{block}/{site}": tensor for site, tensor in kept.items()}

    def wire_bytes(self, bucket: FlatBucket) -> int:
        """Return the bytes of the reducer that sums."""
        return self._inner.wire_bytes(bucket)

    def close(self) -> None:
        """Close connections and threads."""
        self._inner.close()
