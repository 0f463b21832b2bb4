"""The reducers of gradients: uncompressed, or through a codec."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Size, Tensor

from paceline.comm.channel import Channel
from paceline.comm.group import Group, Work
from paceline.comm.program_group import ProgramGroup
from paceline.comm.streams import SideStream, wait_in_queue
from paceline.compression.codec import Algebra, Codec, State, all_of, is_finite
from paceline.compression.exchange import exchange_blocks
from paceline.errors import SettingsError
from paceline.programs import Algorithm, Collective
from paceline.sync.reducer import Divisor, FlatBucket, GradientReducer

CODED_BUCKET_BYTES = 16 * 2**20
"""Size of a bucket if the codec has no own: few, since each costs some messages, however small its payloads are."""

NEEDS = {
    Algebra.LINEAR: {Collective.ALL_REDUCE},
    Algebra.REQUANTISE: {Collective.ALL_REDUCE, Collective.ALL_TO_ALL, Collective.ALL_GATHER},
    Algebra.GATHER: {Collective.ALL_REDUCE, Collective.ALL_GATHER},
}
"""Collectives of a codec's payloads; small blocks are summed uncompressed in any case."""


class DenseReducer(GradientReducer):
    """Sums whole buffers: by the group's own all-reduce, or by a program.

    Args:
        group: Group of the workers.
        program: Program that replaces the group's own all-reduce.
    """

    can_split = True

    def __init__(self, group: Group, program: Algorithm | None) -> None:
        self._size = group.size
        needs = [Collective.ALL_REDUCE] if group.size > 1 else []
        self._program = ProgramGroup(group, program, needs=needs) if program is not None else None
        self._group = self._program or group

    def reduce(self, bucket: FlatBucket, divisor: Divisor, step: int, loss_scale: float = 1.0) -> Work:
        """Start one all-reduce."""
        return self._group.all_reduce(bucket.buffer, name=bucket.name)

    def finalize(self, bucket: FlatBucket, divisor: float) -> None:
        """Divide, which a divisor of exactly 1 saves; on CPUs look for what is not finite."""
        if divisor != 1.0:
            bucket.numerators.div_(divisor)
        is_odd = bucket.buffer.device.type == "cpu" and not bucket.numerators.sum().isfinite()  # or the sum overflowed
        if is_odd and not is_finite(bucket.numerators):
            bucket.findings = torch.zeros(2)

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
        self._threads = [ReducerThread(group, codec, program) for _ in range(self.max_in_flight)]
        self._num_reductions = 0
        self.state_of = codec.name
        self._states: dict[str, State] = {}
        self._pending: dict[str, State] = {}

    def reduce(self, bucket: FlatBucket, divisor: Divisor, step: int, loss_scale: float = 1.0) -> Work:
        """Queue the bucket; every rank uses the thread of the same number for it."""
        thread = self._threads[self._num_reductions % len(self._threads)]
        self._num_reductions += 1

        def job() -> None:
            self._reduce(bucket, thread.group, divisor() * loss_scale, step, loss_scale)

        return thread.submit(job, bucket.buffer.device)

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

    def detached_state(self, shapes: Mapping[str, Size]) -> dict[str, Tensor]:
        """Return this worker's state, with what it owes as an owner in its place."""
        states = {
            block: self._codec.detach(state, shapes[block], self._rank, self._size)
            for block, state in self._states.items()
        }
        return {f"{block}/{site}": kept for block, state in states.items() for site, kept in state.items()}

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

    def _reduce(self, bucket: FlatBucket, group: Group, divisor: float | Tensor, step: int, loss_scale: float) -> None:
        values = {}
        for block, view in bucket.blocks.items():
            if view.is_complex():
                raise SettingsError(
                    f"parameters must be real for codec {self._codec.name!r}, but {block} is {view.dtype}"
                )
            value = view.float().contiguous()
            is_one = not isinstance(divisor, Tensor) and divisor == 1.0
            values[block] = value if is_one else value.div_(divisor)  # the sum takes the bucket's place in any case
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
        # An all-reduce does not tell whose part was not finite; if nobody's was, the sum is too large.
        bucket.findings = torch.stack([tail[-1], torch.ones_like(tail[-1])])
        bucket.findings[1] = all_of(is_finite(each.total) for each in done.values())
        bucket.flags.copy_(tail[:-1])
        for block, exchanged in done.items():
            self._pending[block] = exchanged.state
            bucket.blocks[block].copy_(exchanged.total)
        if loss_scale != 1.0:
            bucket.numerators.mul_(loss_scale)


class ReducerThread:
    """A thread that sums buckets in several operations, with its own connections, and on a GPU its own stream."""

    def __init__(self, group: Group, codec: Codec, program: Algorithm | None) -> None:
        self._connections = group.duplicate("codec")
        self.group = self._connections
        if program is not None:
            needs = NEEDS[codec.algebra] & program.collectives if group.size > 1 else set()
            self.group = ProgramGroup(self._connections, program, needs=needs, runs_here=True)
        self.channel = Channel("paceline-codec")
        self._stream: SideStream | None = None

    def submit(self, job: Callable[[], None], device: torch.device) -> Work:
        """Run a job; on a GPU, after what the caller has queued, beside what it queues from now on.

        The stream's memory is safe: each job begins after a mark of the computing stream, which has by then waited for
        all jobs of earlier steps.
        """
        if device.type == "cpu":
            return self.channel.submit(job)
        stream = self._stream = self._stream or SideStream(device)
        ready, ended = stream.mark(), []

        def run() -> None:
            with torch.cuda.device(device if device.type == "cuda" else -1), stream.running(ready):  # else on GPU 0
                job()
                ended.append(stream.mark())

        return _StreamWork(self.channel.submit(run), ended, device)

    def close(self) -> None:
        """Close them."""
        self.channel.close()
        if self.group is not self._connections:
            self.group.close()
        self._connections.close()


class _StreamWork(Work):
    """A job whose result is queued on another stream: waiting makes the caller's stream wait too."""

    def __init__(self, job: Work, ended: list[Any], device: torch.device) -> None:
        self._job, self._ended, self._device = job, ended, device

    def wait(self) -> None:
        """Block until the job is queued, and queue what follows after it."""
        self._job.wait()
        self.began_s, self.ended_s = self._job.began_s, self._job.ended_s
        wait_in_queue(self._device, self._ended[0])


def of_block(tensors: Mapping[str, Tensor], block: str) -> State:
    """Return a block's state, by site, of tensors that are named `<block>/<site>`."""
    return {name.removeprefix(f"{block}/"): kept for name, kept in tensors.items() if name.startswith(f"{block}/")}
