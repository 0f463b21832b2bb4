"""The reducers of gradients: uncompressed, or through a codec."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Size, Tensor

from paceline.comm.channel import Channel
from paceline.comm.group import Group, Work
from paceline.comm.program_group import ProgramGroup
from paceline.compression.codec import Codec, State, is_finite
from paceline.compression.exchange import exchange_blocks
from paceline.errors import SettingsError
from paceline.programs import Algorithm
from paceline.sync.reducer import FlatBucket, GradientReducer

CODED_BUCKET_BYTES = 16 * 2**20
"""Size of a bucket if the codec has no own: few, since each costs some messages, however small its payloads are."""


class DenseReducer(GradientReducer):
    """Sums whole buffers: by the group's own all-reduce, or by a program.

    Args:
        group: Group of the workers.
        program: Program that replaces the group's own all-reduce.
    """

    can_split = True

    def __init__(self, group: Group, program: Algorithm | None) -> None:
        self._size = group.size
        self._program = ProgramGroup(group, program) if program is not None else None
        self._group = self._program or group

    def reduce(self, bucket: FlatBucket, divisor: Callable[[], float], step: int, loss_scale: float = 1.0) -> Work:
        """Start one all-reduce."""
        return self._group.all_reduce(bucket.buffer, name=bucket.name)

    def finalize(self, bucket: FlatBucket, divisor: float) -> None:
        """Divide, which a divisor of exactly 1 saves; on CPUs look for what is not finite."""
        if divisor != 1.0:
            bucket.numerators.div_(divisor)
        bucket.has_overflown = bucket.buffer.device.type == "cpu" and not is_finite(bucket.numerators)

    def commit(self, unused: Collection[str]) -> None:
        """Do nothing: there is no state."""

    def wire_bytes(self, bucket: FlatBucket) -> int:
        """Return the bytes of an all-reduce that sends the least."""
        return round(2 * (self._size - 1) / self._size * bucket.numerators.nbytes)

    def close(self) -> None:
        """Close this reducer's own connections."""
        if self._program is not None:
            self._program.close()


class CodecReducer(GradientReducer):
    """Sums blocks through a codec, in a separate thread, and keeps the codec's state.

    A codec gets gradients that are already divided by the weight, so that residuals of one step have the right
    weight in any other. Each bucket tells all workers whether they are finite: signs and largest elements hide it.
    """

    def __init__(self, group: Group, codec: Codec, program: Algorithm | None, seed: int) -> None:
        self._codec = codec
        self._seed = seed
        self.bucket_bytes, self.max_in_flight = codec.bucket_bytes or CODED_BUCKET_BYTES, codec.max_in_flight
        self._rank, self._size = group.rank, group.size
        self._threads = [_CodecThread(group, program) for _ in range(self.max_in_flight)]
        self._num_reductions = 0
        self.state_of = codec.name
        self._states: dict[str, State] = {}
        self._pending: dict[str, State] = {}

    def reduce(self, bucket: FlatBucket, divisor: Callable[[], float], step: int, loss_scale: float = 1.0) -> Work:
        """Queue the bucket; every rank uses the thread of the same number for it."""
        thread = self._threads[self._num_reductions % len(self._threads)]
        self._num_reductions += 1

        def job() -> None:
            with torch.cuda.device_of(bucket.buffer):  # a thread begins on GPU 0; -1 for a CPU tensor changes nothing
                self._reduce(bucket, thread.group, divisor() * loss_scale, step, loss_scale)

        return thread.channel.submit(job)

    def finalize(self, bucket: FlatBucket, divisor: float) -> None:
        """Do nothing: the codec has divided already."""

    def commit(self, unused: Collection[str]) -> None:
        """Keep the states of the exchanges."""
        self._states |= {block: state for block, state in self._pending.items() if block not in unused}
        self._pending = {}

    def roll_back(self) -> None:
        """Drop the states of the exchanges."""
        self._pending = {}

    def state(self) -> dict[str, Tensor]:
        """Return the state of each block, as ``<block>/<site>``."""
        return {f"{block}/{site}": kept for block, state in self._states.items() for site, kept in state.items()}

    def load_state(self, saved: list[dict[str, Tensor]], shapes: Mapping[str, Size]) -> None:
        """Load this worker's state; that of another number of workers is divided, so that nothing is lost."""
        for block, shape in shapes.items():
            by_worker = [of_block(tensors, block) for tensors in saved]
            if any(by_worker):
                self._states[block] = self._codec.resize(by_worker, shape, self._rank, self._size)

    def wire_bytes(self, bucket: FlatBucket) -> int:
        """Return the codec's stated bytes."""
        return sum(self._codec.wire_bytes(view.shape, self._size) for view in bucket.blocks.values())

    def close(self) -> None:
        """Close threads and connections."""
        for thread in self._threads:
            thread.close()

    def _reduce(self, bucket: FlatBucket, group: Group, divisor: float, step: int, loss_scale: float) -> None:
        values = {}
        for block, view in bucket.blocks.items():
            if view.is_complex():
                raise SettingsError(
                    f"parameters must be real for codec {self._codec.name!r}, but {block} is {view.dtype}"
                )
            value = view.float().contiguous()
            values[block] = value / divisor if divisor != 1.0 else value
        tail = torch.cat([bucket.flags.float(), bucket.flags.new_zeros(1, dtype=torch.float32)])
        done = exchange_blocks(
            self._codec,
            values,
            self._states,
            group,
            step=step,
            seed=self._seed,
            name=bucket.name,
            tail=tail,
            timed=self.timed,
        )
        bucket.num_non_finite = int(tail[-1])
        # An all-reduce does not tell whose part was not finite; if nobody's was, the sum is too large.
        bucket.has_overflown = not bucket.num_non_finite and not all(is_finite(each.total) for each in done.values())
        bucket.flags.copy_(tail[:-1])
        for block, exchanged in done.items():
            self._pending[block] = exchanged.state
            bucket.blocks[block].copy_(exchanged.total)
        if loss_scale != 1.0:
            bucket.numerators.mul_(loss_scale)


class _CodecThread:
    """A thread that sums buckets through a codec, with its own connections."""

    def __init__(self, group: Group, program: Algorithm | None) -> None:
        self._connections = group.duplicate("codec")
        self.group = self._connections
        if program is not None:
            self.group = ProgramGroup(self._connections, program, runs_here=True)
        self.channel = Channel("paceline-codec")

    def close(self) -> None:
        """Close them."""
        self.channel.close()
        if self.group is not self._connections:
            self.group.close()
        self._connections.close()


def of_block(tensors: Mapping[str, Tensor], block: str) -> State:
    """Return a block's state, by site, of tensors that are named `<block>/<site>`."""
    return {name.removeprefix(f"{block}/"): kept for name, kept in tensors.items() if name.startswith(f"{block}/")}
