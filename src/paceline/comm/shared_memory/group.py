"""A group whose ranks are processes of one host that share memory."""

import ctypes
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.channel import Channel, Job
from paceline.comm.group import Group, Work
from paceline.comm.hang_watch import Verdict
from paceline.comm.shared_memory.buffers import PLACE, Buffers
from paceline.comm.shared_memory.control_segment import SMALL_BYTES, open_control_segment
from paceline.comm.shared_memory.flight_recorder import MAX_AHEAD, Operation
from paceline.comm.shared_memory.rendezvous import SharedMemoryError
from paceline.comm.shared_memory.ring import RingStep
from paceline.comm.shared_memory.segment import Segment, create, reserve, round_to_pages
from paceline.comm.shared_memory.transfers import (
    AllGatherTransfer,
    AllToAllTransfer,
    BroadcastTransfer,
    SlicedSumTransfer,
    SumTransfer,
    Transfer,
    check_rows,
    check_source,
    check_sum,
    check_tensor,
    copy_in_tiles,
    flatten,
    sum_in_place,
)
from paceline.comm.threads import call_weakly
from paceline.comm.torch_group import TorchGroup
from paceline.errors import CommunicationError, PacelineError


class SharedMemoryWarning(UserWarning):
    """Memory could not be shared; training works, but is slower."""


class SharedMemoryGroup(Group):
    """Ranks that are processes of one host: the same boot, the same network namespace (`host_key`).

    Operations of at most 16 KiB are posted at once, and finished by the thread that waits for them. Larger ones run in
    the group's own thread, which sleeps while it waits. If all ranks sum a buffer that `allocate` made, each sums one
    slice of all buffers and writes it to all of them; other tensors travel through a small shared ring, in chunks.
    Sums run in the order of ranks. Messages (`send`, `receive`) go over a `TorchGroup`.

    Args:
        store: Store by which the ranks find each other; all its keys belong to this group (give it a prefix).
        rank: Rank of this process.
        size: Number of ranks.
        timeout_s: Longest time of an operation before `PeerTimeoutError`.
        epoch: Number of the membership that the group belongs to.
        names: Number of each rank in errors.

    Raises:
        SharedMemoryError: Some rank cannot share memory; raised on all ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        epoch: int = 0,
        names: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, size, torch.device("cpu"), epoch, names)
        self.timeout_s = timeout_s
        self.store: dist.Store = store
        control = open_control_segment(dist.PrefixStore("control", store), rank, self.names, timeout_s, epoch)
        self._hub, self._recorder, self._small, self._large = (
            control.hub,
            control.recorder,
            control.small,
            control.large,
        )
        self._buffers = Buffers(rank, size)
        self._network = TorchGroup(
            dist.PrefixStore("network", store),
            rank,
            size,
            device=self.device,
            timeout_s=timeout_s,
            epoch=epoch,
            names=self.names,
            on_verdict=call_weakly(self._end_by),
        )
        self._recorder.board = self._network.board
        self._channel: Channel | None = None
        """Made on first use: many groups carry small tensors only."""
        self._outstanding: deque[RingStep | Job] = deque()
        self._duplicates: list[Group] = []
        self._subgroups: list[Group] = []
        self._is_closed = False

    def all_reduce(self, tensor: Tensor, *, name: str) -> Work:
        """Sum in the order of ranks."""
        flat = flatten(tensor, name)
        check_sum(flat.dtype)
        operation = self._begin(name, "all_reduce", tensor)
        if flat.nbytes <= SMALL_BYTES:
            return self._track(SumTransfer(flat).post(self._small, operation))
        return self._submit(operation, lambda: self._sum(operation, flat))

    def broadcast(self, tensor: Tensor, *, source: int = 0, name: str) -> Work:
        """Copy from `source`."""
        check_source(source, self.size)
        flat = flatten(tensor, name)
        operation = self._begin(name, f"broadcast from {source}", tensor)
        transfer = BroadcastTransfer(flat, source, self.rank)
        if flat.nbytes <= SMALL_BYTES:
            return self._track(transfer.post(self._small, operation))
        return self._submit(operation, lambda: self._copy(operation, transfer))

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Copy every rank's tensor to all ranks."""
        check_tensor(tensor, name)
        check_rows(output, self.size, tensor.nbytes, name)
        operation = self._begin(name, "all_gather", tensor)
        return self._transfer(operation, AllGatherTransfer(output, tensor.contiguous()))

    def all_to_all(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Copy every rank's rows to their destinations."""
        check_rows(tensor, self.size, tensor.nbytes // self.size, name)
        check_rows(output, self.size, tensor.nbytes // self.size, name)
        operation = self._begin(name, "all_to_all", tensor)
        return self._transfer(operation, AllToAllTransfer(output, tensor, self.rank))

    def send(self, tensor: Tensor, destination: int, *, tag: int, name: str) -> Work:
        """Send over the network group."""
        return self._network.send(tensor, destination, tag=tag, name=name)

    def receive(self, tensor: Tensor, source: int, *, tag: int, name: str) -> Work:
        """Receive over the network group."""
        return self._network.receive(tensor, source, tag=tag, name=name)

    def wait_for(self, works: Sequence[Work]) -> None:
        """Wait for operations; for messages as the network group does."""
        self._network.wait_for(works)

    def begin(self, name: str) -> None:
        """Record it in the network group, which sends the messages."""
        self._network.begin(name)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed buffer in shared memory, or a private one with a warning if memory is short."""
        if self.size == 1 or num_elements == 0:
            return torch.zeros(num_elements, dtype=dtype)
        name = f"allocation of {num_elements} {dtype}"
        num_bytes = self._buffers.num_bytes(num_elements, dtype)
        memory, reasons = self._share_segment(
            name, num_bytes, lambda descriptor: self._buffers.map(descriptor, num_bytes)
        )
        if memory is None:
            if self.rank == 0:
                _warn_of_private_buffer(name, reasons)
            return torch.zeros(num_elements, dtype=dtype)
        memory.populate()
        return self._buffers.add(memory, num_elements, dtype)

    def leave_losses_to_supervisor(self) -> None:
        """Let a supervisor find out who is lost, also for messages."""
        super().leave_losses_to_supervisor()
        self._network.leave_losses_to_supervisor()

    @property
    def host_ranks(self) -> list[int]:
        """All ranks."""
        return list(range(self.size))

    def share(self, num_bytes: Mapping[int, int]) -> dict[int, Tensor]:
        """Return the buffers of all ranks, or none with a warning if memory is short."""
        *starts, total = accumulate((round_to_pages(num_bytes[rank]) for rank in range(self.size)), initial=0)
        if self.size == 1 or total == 0:
            return {}

        def map_all(descriptor: int) -> Segment:
            if num_bytes[self.rank]:
                reserve(descriptor, starts[self.rank], num_bytes[self.rank])
            return Segment(descriptor, total)  # others may read this rank's part after it has left

        name = f"sharing of {total} bytes"
        memory, reasons = self._share_segment(name, total, map_all)
        if memory is None:
            if self.rank == 0:
                _warn_of_private_buffer(name, reasons)
            return {}
        whole = torch.frombuffer(memory.buffer, dtype=torch.uint8)
        return {rank: whole[start : start + num_bytes[rank]] for rank, start in enumerate(starts)}

    def duplicate(self, name: str) -> Group:
        """Return a group with its own memory and connections; without the memory if that is short."""
        store = dist.PrefixStore(f"duplicate{len(self._duplicates)} {name}", self.store)
        group: Group
        try:
            group = self._open(store, range(self.size))
        except SharedMemoryError as error:
            if self.rank == 0:
                warnings.warn(f"group {name!r} goes over the network: {error}", SharedMemoryWarning, stacklevel=2)
            group = self._network.duplicate(name)
        self._duplicates.append(group)
        return group

    def subgroup(self, ranks: Sequence[int], name: str) -> Group:
        """Return a group with its own memory among `ranks`."""
        store = dist.PrefixStore(self._name_subgroup(ranks, name), self.store)
        subgroup = self._open(store, ranks)
        self._subgroups.append(subgroup)
        return subgroup

    def link(self, peer: int, name: str) -> Group:
        """Return a link over the network group."""
        return self._network.link(peer, name)

    def close(self, error: BaseException | None = None) -> None:
        """Leave when all operations have ended; with an `error`, at once."""
        for duplicate in (*self._duplicates, *self._subgroups):
            duplicate.close(error)
        if self._is_closed:
            return
        self._is_closed = True
        error = error or self._recorder.failure
        if isinstance(error, PacelineError):
            self._recorder.failure = self._recorder.failure or error  # which ends operations in other threads
            self._small.abandon()
            self._large.abandon()
        last_words = f"{type(error).__name__}: {error}" if error else ""
        if self._channel is None or error is not None:
            self._leave(last_words)
        if self._channel is not None:
            self._channel.close(None if error is not None else lambda: self._leave(""))
        self._hub.close()
        self._network.close(error)

    def _end_by(self, verdict: Verdict) -> None:
        """End all operations here, with an error that names the ranks that hang."""
        operation = self._recorder.describe_last()
        self._recorder.failure = self._recorder.failure or verdict.to_error(operation)

    def _open(self, store: dist.Store, ranks: Sequence[int]) -> "SharedMemoryGroup":
        opened = SharedMemoryGroup(
            store,
            self.place_in(ranks),
            len(ranks),
            timeout_s=self.timeout_s,
            epoch=self.epoch,
            names=self.names_of(ranks),
        )
        if self.is_supervised:
            opened.leave_losses_to_supervisor()
        return opened

    def _leave(self, last_words: str) -> None:
        self._recorder.leave(last_words)
        self._small.wake_others()
        self._large.wake_others()

    def _begin(self, name: str, kind: str, tensor: Tensor | None = None) -> Operation:
        if self._is_closed:
            raise CommunicationError(f"operation {name!r} must be begun before the group is closed; it is closed")
        while self._outstanding and self._outstanding[0].is_done:
            self._outstanding.popleft()
        if len(self._outstanding) >= MAX_AHEAD:
            self._outstanding[0].wait()
        of = f" of {tensor.numel()} {tensor.dtype}" if tensor is not None else ""
        dense = "" if tensor is None or tensor.is_contiguous() else f", strides {tensor.stride()}"
        return self._recorder.begin(name, f"{kind}{of}{dense}")

    def _track(self, work: RingStep | Job) -> Work:
        self._outstanding.append(work)
        return work

    def _transfer(self, operation: Operation, transfer: Transfer) -> Work:
        if transfer.num_bytes * transfer.copies <= SMALL_BYTES:
            return self._track(transfer.post(self._small, operation))
        return self._submit(operation, lambda: transfer.run(self._large, operation))

    def _submit(self, operation: Operation, function: Callable[[], None]) -> Work:
        if self._channel is None:
            self._channel = Channel("paceline-shared-memory", on_wait=self._recorder.wait_in, waiters_run=True)
        return self._track(self._channel.submit(function, operation.sequence))

    def _sum(self, operation: Operation, flat: Tensor) -> None:
        parts = self._find_parts(operation, flat)
        if parts is None:
            SlicedSumTransfer(flat, self.rank, self.size).run(self._large, operation)
            return
        sum_in_place(parts, self.rank)
        self._large.post(operation, None, None).wait()

    def _copy(self, operation: Operation, transfer: BroadcastTransfer) -> None:
        parts = self._find_parts(operation, transfer.flat)
        if parts is None:
            transfer.run(self._large, operation)
            return
        if self.rank != transfer.source:
            copy_in_tiles(parts[transfer.source], transfer.flat)
        self._large.post(operation, None, None).wait()

    def _find_parts(self, operation: Operation, flat: Tensor) -> list[Tensor] | None:
        """Return the tensors of all ranks, once all have begun the operation; None if they are not shared."""
        mine, places = self._buffers.locate(flat), list[bytes]()
        large, size = self._large, self.size  # steps that never end hold these, but not the group with its connections

        def read(slot: int) -> None:
            places.extend(ctypes.string_at(large.address(slot, rank), PLACE.size) for rank in range(size))

        def fill(slot: int) -> None:
            ctypes.memmove(large.address(slot), mine, PLACE.size)

        large.post(operation, fill, read).wait()
        return self._buffers.find_parts(flat, places)

    def _share_segment(
        self, name: str, num_bytes: int, map_here: Callable[[int], Segment]
    ) -> tuple[Segment | None, list[str | None]]:
        """Return a segment that all ranks have mapped, or None and the reasons, by rank."""
        operation = self._begin(name, "allocate")
        self._small.post(operation, None, None).wait()
        descriptor, memory, reason = None, None, None
        if self.rank == 0:
            descriptor, reason = _attempt(lambda: create(num_bytes))
        try:
            reasons = self.gather_documents(reason, name=name)
            if any(reasons):
                return None, reasons
            began_s = time.monotonic()

            def check() -> None:
                self._recorder.check_peers(operation, began_s, lambda: [0])

            shared, reason = _attempt(lambda: self._hub.share(descriptor, self.timeout_s, check))
            descriptor = descriptor if self.rank == 0 else shared
            if shared is not None:
                memory, reason = _attempt(lambda: map_here(shared))
        finally:
            if descriptor is not None:
                os.close(descriptor)
        reasons = self.gather_documents(reason, name=name)
        return None if any(reasons) else memory, reasons


T = TypeVar("T")


def _attempt(make: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of `make`, or the system's reason for refusing it."""
    try:
        return make(), None
    except OSError as error:
        return None, str(error)


def _warn_of_private_buffer(name: str, reasons: Sequence[str | None]) -> None:
    failed = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)
    warnings.warn(
        f"{name} could not be made in shared memory ({failed}), so its contents are copied from rank to rank, "
        "which is slower; free memory on the host, or silence this with "
        "warnings.filterwarnings('ignore', category=paceline.comm.SharedMemoryWarning)",
        SharedMemoryWarning,
        stacklevel=3,
    )
