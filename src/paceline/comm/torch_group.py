"""A group over torch.distributed's process groups: gloo on CPUs, NCCL on GPUs."""

import contextlib
import ctypes
import functools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.channel import Channel
from paceline.comm.connecting import connect
from paceline.comm.group import MAX_TAG, Group, Work
from paceline.comm.hang_watch import Verdict
from paceline.comm.heartbeat import HeartbeatBoard
from paceline.comm.heartbeat_record import MESSAGE
from paceline.comm.pacing import SLICE_BYTES, find_limit
from paceline.comm.threads import call_weakly
from paceline.comm.watchdog import Watchdog
from paceline.errors import CommunicationError, MismatchError, PacelineError, PeerTimeoutError, SettingsError

HOST_ADDRESS = "PACELINE_HOST_ADDRESS"
"""Environment variable that a launcher sets to the address of this machine that workers on others can reach."""
_NEVER_SENT = MAX_TAG + 1
"""Tag that no message has."""
_PROBE_INTERVAL_S = 1.0
_LATER_S = 60.0
"""Time by which a backend's own time-out is longer than that of an operation."""


class TorchGroup(Group):
    """Ranks that are processes, on one host or many. Torch's global default group is never used.

    An operation that fails closes this rank's connections, so that all others notice at once. On GPUs there are no
    messages: NCCL has no tags, and a waiting message would block everything queued after it. Use `on_cpu` for them.

    Args:
        store: Store by which the ranks find each other; all its keys belong to this group (give it a prefix).
        rank: Rank of this process.
        size: Number of ranks.
        device: Device of the tensors: gloo for a CPU, NCCL for a CUDA device.
        timeout_s: Longest time of an operation before `PeerTimeoutError`. On GPUs, where the host does not wait for
            operations, a `Watchdog` looks.
        epoch: Number of the membership that the group belongs to.
        names: Number of each rank in errors.
        on_verdict: Function that ends the operations of a group above this one, if ranks that it waits for hang.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        device: torch.device,
        timeout_s: float,
        epoch: int = 0,
        names: Sequence[int] | None = None,
        on_verdict: Callable[[Verdict], None] = lambda _: None,
    ) -> None:
        super().__init__(rank, size, device, epoch, names)
        self.timeout_s = timeout_s
        self.store: dist.Store = store
        self._sequence = 0
        self._tell_above = on_verdict
        self._num_duplicates = 0
        self._duplicates: weakref.WeakSet[TorchGroup] = weakref.WeakSet()
        self._on_cpu: TorchGroup | None = None
        self._senders: Channel | None = None
        self._paced: Channel | None = None
        # A backend gives up after its own time-out without saying who was late: ours comes first.
        backend_s, backend_store = timedelta(seconds=timeout_s + _LATER_S), dist.PrefixStore("backend", store)
        make = partial(_make_backend, backend_store, rank, size, device, backend_s)
        others = [name for name in self.names if name != self.names[rank]]
        self._backend: Any = make() if device.type != "cpu" else connect(make, store, epoch, others, timeout_s)
        self._verdict: Verdict | None = None
        self._board = HeartbeatBoard(dist.PrefixStore("board", store), rank, self.names, call_weakly(self._end_by))
        self._watchdog: Watchdog | None = None
        if device.type != "cpu":
            self._watchdog = Watchdog(timeout_s, self._board.describe_others, self._backend.abort)

    def all_reduce(self, tensor: Tensor, *, name: str) -> Work:
        """Sum by the backend's own all-reduce."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        sent = 2 * (self.size - 1) / self.size
        return self._begin(
            "all_reduce", name, lambda part: self._backend.allreduce([part], options), tensor, sent, is_cut=True
        )

    def broadcast(self, tensor: Tensor, *, source: int = 0, name: str) -> Work:
        """Broadcast by the backend."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._begin(
            "broadcast", name, lambda part: self._backend.broadcast([part], options), tensor, 1, is_cut=True
        )

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """All-gather by the backend."""
        rows = list(output.unbind(0))
        return self._begin(
            "all_gather", name, lambda part: self._backend.allgather([rows], [part]), tensor, self.size - 1
        )

    def all_to_all(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """All-to-all by the backend."""
        options = dist.AllToAllOptions()
        sent = (self.size - 1) / self.size
        return self._begin(
            "all_to_all", name, lambda part: self._backend.alltoall_base(output, part, [], [], options), tensor, sent
        )

    def send(self, tensor: Tensor, destination: int, *, tag: int, name: str) -> Work:
        """Send by the backend."""
        self._check_message(tensor, destination, tag)
        where = f"message {name!r} from rank {self.names[self.rank]} to rank {self.names[destination]}"
        if (limit := find_limit()) is not None:
            limit.take(tensor.nbytes)
        return self._start(where, lambda: self._backend.send([tensor], destination, tag), destination)

    def receive(self, tensor: Tensor, source: int, *, tag: int, name: str) -> Work:
        """Receive by the backend."""
        self._check_message(tensor, source, tag)
        where = f"message {name!r} from rank {self.names[source]} to rank {self.names[self.rank]}"
        return self._start(where, lambda: self._backend.recv([tensor], source, tag))

    def duplicate(self, name: str) -> "TorchGroup":
        """Return a group with its own connections."""
        self._num_duplicates += 1
        store = dist.PrefixStore(f"duplicate{self._num_duplicates} {name}", self.store)
        return self._open(store, range(self.size), self.device)

    def subgroup(self, ranks: Sequence[int], name: str) -> "TorchGroup":
        """Return a group with its own connections among `ranks`."""
        store = dist.PrefixStore(self._name_subgroup(ranks, name), self.store)
        return self._open(store, ranks, self.device)

    def on_cpu(self) -> "TorchGroup":
        """Return this group, or a gloo group beside NCCL's."""
        if self.device.type == "cpu":
            return self
        if self._on_cpu is None:
            store = dist.PrefixStore("on cpu", self.store)
            self._on_cpu = self._open(store, range(self.size), torch.device("cpu"))
        return self._on_cpu

    def begin(self, name: str, what: str = "") -> None:
        """Post it to the heartbeat."""
        self._sequence += 1
        self._board.begin(self._sequence, name, what)

    @property
    def board(self) -> HeartbeatBoard:
        """Heartbeats of the ranks."""
        return self._board

    def close(self, error: BaseException | None = None) -> None:
        """Post a last heartbeat; connections close now if there is an `error`, else with the process group.

        Any thread may call it with an `error`: operations under way here end at once.
        """
        for duplicate in list(self._duplicates):
            duplicate.close(error)
        self._board.close(f"{type(error).__name__}: {error}" if error else "")
        if self._watchdog is not None:
            self._watchdog.close()
        for channel in (self._senders, self._paced):
            if channel is not None:
                channel.close()
        if error is not None:
            self._disconnect()

    def _open(self, store: dist.Store, ranks: Sequence[int], device: torch.device) -> "TorchGroup":
        """Return a group that is closed with this one."""
        opened = TorchGroup(
            store,
            self.place_in(ranks),
            len(ranks),
            device=device,
            timeout_s=self.timeout_s,
            epoch=self.epoch,
            names=self.names_of(ranks),
        )
        opened.is_supervised = self.is_supervised
        self._duplicates.add(opened)
        return opened

    def _check_message(self, tensor: Tensor, peer: int, tag: int) -> None:
        self.check_message(peer, tag)
        if tensor.device.type != "cpu":
            raise SettingsError(
                f"a message must be on the CPU, but got one on {tensor.device}; use the collectives of NCCL on GPUs"
            )

    def _begin(
        self,
        kind: str,
        name: str,
        operation: Callable[[Tensor], dist.Work],
        tensor: Tensor,
        sent: float,
        *,
        is_cut: bool = False,
    ) -> Work:
        """Begin a collective of `tensor`; under a limit of the bandwidth in the group's own thread, slice by slice.

        Args:
            kind: Name of the collective.
            name: Name of the operation.
            operation: Function that begins it on the tensor, or on a slice of it.
            tensor: Tensor that is sent.
            sent: Bytes that a rank sends to those of the tensor.
            is_cut: Whether the operation on slices is that on the whole.
        """
        self.begin(name, f"{kind} of {tensor.numel()} {tensor.dtype}")
        where = f"operation {self._sequence} {name!r} on rank {self.names[self.rank]}"
        limit = find_limit() if self.device.type == "cpu" else None
        if limit is None:
            work = self._start(where, lambda: operation(tensor))
            if self._watchdog is not None:
                self._watchdog.watch(work.operation, where, self._sequence)
            work.note_times()
            return work
        length = max(1, int(SLICE_BYTES / sent) // tensor.element_size()) if is_cut and sent else max(1, tensor.numel())
        parts = tensor.view(-1).split(length) if is_cut else [tensor]

        def run() -> None:
            for part in parts:
                limit.take(part.nbytes * sent)
                self._start(where, partial(operation, part)).wait()

        self._paced = self._paced or Channel("paceline-paced")
        return self._paced.submit(run)

    def _start(self, where: str, operation: Callable[[], dist.Work], sent_to: int | None = None) -> "_TorchWork":
        try:
            work = operation()
        except RuntimeError as error:
            raise self._explain(error, where, self._sequence, time.monotonic()) from error
        return _TorchWork(self, work, where, self._sequence, sent_to)

    def wait_for(self, works: Sequence[Work]) -> None:
        """Wait for operations; for sends in one go, which takes two thread switches and not two for each."""
        sends = [work for work in works if isinstance(work, _TorchWork) and work.sent_to is not None]
        super().wait_for([work for work in works if work not in sends])
        self._wait(sends)

    def _wait(self, works: "Sequence[_TorchWork]") -> None:
        """Wait for sends, or for one other operation."""
        if not works:
            return
        began_s = time.monotonic()
        left = list(works)
        self._board.wait_in(works[0].sequence or MESSAGE)
        try:
            if works[0].sent_to is not None:
                self._wait_for_sends(left)
            elif self.device.type == "cpu":
                works[0].operation.wait(timedelta(seconds=self.timeout_s))
            else:
                works[0].operation.wait()
        except RuntimeError as error:
            failed = next(iter(left), works[-1])
            self.check()
            raise self._explain(error, failed.where, failed.sequence, began_s) from error
        self.check()
        self._board.wait_in(0)

    def check(self) -> None:
        """Raise the error of an operation that the watchdog has aborted, if there is one."""
        if self._watchdog is not None:
            self._watchdog.check()

    def _wait_for_sends(self, left: "list[_TorchWork]") -> None:
        """Wait for sends in a thread that can be abandoned, and check that the receivers live; ends those `left`.

        When a receiver dies in the middle of a message, gloo ends receives from it, but forgets the send, which would
        wait until its time-out. To begin a receive from that rank fails, however; so that is tried when the receiver
        has posted no new heartbeat, not more often, since a receive that does not fail costs memory.
        """
        if self._senders is None:
            self._senders = Channel("paceline-senders")

        def wait() -> None:
            while left:
                left[0].operation.wait(timedelta(seconds=self.timeout_s))
                left.pop(0)

        waiting = self._senders.submit(wait)
        last_beats: dict[int, int] = {}
        while not waiting.ends_within(_PROBE_INTERVAL_S):
            first = next(iter(left), None)  # one look: the other thread removes what has ended
            if first is None or (destination := first.sent_to) is None:
                continue
            position = self._board.read(destination)
            if position is None or position.last_words or position.beat == last_beats.get(destination, 0):
                self._backend.recv([torch.zeros(1)], destination, _NEVER_SENT)
            last_beats[destination] = position.beat if position else 0
        waiting.wait()

    def _end_by(self, verdict: Verdict) -> None:
        """End all operations here, with an error that names the ranks that hang or have ended."""
        self._verdict = verdict
        self._tell_above(verdict)
        if self.device.type == "cpu":
            self._disconnect()
        else:
            self._backend.abort()

    def _explain(self, error: RuntimeError, where: str, sequence: int, began_s: float) -> PacelineError:
        waited_s = time.monotonic() - began_s
        if not is_lost_peer(error):
            return SettingsError(
                f"{where} must be one that the backend can do, but it says {first_sentence(error)!r}; "
                "use another dtype or device"
            )
        # The backend's destructor would wait for the failed operation, a minute and more: it never runs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))
        if self._verdict is not None:
            self._disconnect()
            return self._verdict.to_error(where)
        if waited_s >= self.timeout_s:
            others = self._board.describe_others(sequence)
            mismatch = self._board.find_mismatch()
            self._disconnect()  # only now, so that ranks that began later reach their own time-out
            if mismatch:
                return MismatchError(mismatch)
            return PeerTimeoutError(f"{where} must finish within {self.timeout_s:g} s, but did not: {others}")
        self._disconnect()
        if self.is_supervised:
            return CommunicationError(f"{where} lost a peer (the backend says: {first_sentence(error)})")
        others = self._board.describe_others(sequence)
        if mismatch := self._board.find_mismatch():
            return MismatchError(mismatch)
        return CommunicationError(f"{where} lost its peers: {others} (the backend says: {first_sentence(error)})")

    def _disconnect(self) -> None:
        """Close all connections, which ends every operation under way here and at the peers.

        gloo has no call for that, but it does so when a message is late: here, one that is never sent.
        """
        if self.device.type != "cpu":
            return
        nothing = torch.zeros(1)
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    self._backend.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


class _TorchWork(Work):
    def __init__(self, group: TorchGroup, operation: dist.Work, where: str, sequence: int, sent_to: int | None) -> None:
        self._group = group
        self.operation = operation
        self.where = where
        self.sequence = sequence
        self.sent_to = sent_to

    def wait(self) -> None:
        self._group._wait([self])

    def check(self) -> None:
        self._group.check()

    def note_times(self) -> None:
        """Note the times of a collective that has just begun, on a CPU: on a GPU it may still be queued."""
        if self._group.device.type == "cpu":
            self.began_s = time.perf_counter()
            self.operation.get_future().add_done_callback(self._note_end)

    def _note_end(self, _: Any) -> None:
        self.ended_s = time.perf_counter()


# Only the words of a backend's error tell a lost peer from a call that the backend cannot do.
_NETWORK_WORDS = ("connection", "timed out", "timeout", "socket", "transport", "peer", "broken pipe", "nccl")


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether torch raised the error because a peer died or stopped answering."""
    return any(word in str(error).lower() for word in _NETWORK_WORDS)


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of what a backend says, without its place in the backend's source."""
    return str(error).splitlines()[0].split("] ")[-1].split(". ")[0]


@functools.cache
def _gloo_devices(pid: int) -> list[Any]:
    """Return the devices of all connections of this process, found as torch does without options.

    A device has a thread that wakes a hundred times a second. Torch makes one device per group, and a worker with
    servers has many groups. A forked child lacks its parent's threads, so each process has its own devices.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces and (address := os.environ.get(HOST_ADDRESS)):
        return [dist.ProcessGroupGloo.create_device(hostname=address)]
    if not interfaces:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=interface) for interface in interfaces.split(",")]


def _make_backend(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> "dist.ProcessGroupGloo | dist.ProcessGroupNCCL":
    if device.type == "cpu":
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout, gloo._devices = timeout, _gloo_devices(os.getpid())
        return dist.ProcessGroupGloo(store, rank, size, gloo)
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
