"""A group over torch.distributed's process groups: gloo on CPUs, NCCL on GPUs."""

import ctypes
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Group, Work
from paceline.comm.positions import PositionBoard
from paceline.errors import CommunicationError, PeerTimeoutError, SettingsError


class TorchGroup(Group):
    """Ranks that are processes, on one host or many. It never touches torch's global default group.

    Args:
        store: Where the ranks find each other; keys are this group's own (give it a prefix).
        rank: This process's number.
        size: Number of ranks.
        device: A CPU takes gloo, a CUDA device NCCL.
        timeout_s: How long an operation may take before `PeerTimeoutError`.
        epoch: Number of the membership that this group is of.
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
    ) -> None:
        super().__init__(rank, size, device, epoch)
        self.timeout_s = timeout_s
        self._store = store
        self._sequence = 0
        self._num_duplicates = 0
        # gloo gives up by itself after its own time-out, and then nobody can say who was late: ours comes first.
        backend_timeout = timedelta(seconds=timeout_s + 60)
        self._backend: Any = _make_backend(dist.PrefixStore("backend", store), rank, size, device, backend_timeout)
        self._board = PositionBoard(dist.PrefixStore("board", store), rank, size)

    def all_reduce(self, tensor: Tensor, *, name: str) -> Work:
        """Sum by the backend's own all-reduce."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        return self._begin(name, lambda: self._backend.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor, *, source: int = 0, name: str) -> Work:
        """Broadcast by the backend."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._begin(name, lambda: self._backend.broadcast([tensor], options))

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """All-gather by the backend."""
        return self._begin(name, lambda: self._backend.allgather([list(output.unbind(0))], [tensor]))

    def all_to_all(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """All-to-all by the backend."""
        options = dist.AllToAllOptions()
        return self._begin(name, lambda: self._backend.alltoall_base(output, tensor, [], [], options))

    def send(self, tensor: Tensor, destination: int, *, tag: int, name: str) -> Work:
        """Send by the backend."""
        return self._begin(name, lambda: self._backend.send([tensor], destination, tag))

    def receive(self, tensor: Tensor, source: int, *, tag: int, name: str) -> Work:
        """Receive by the backend."""
        return self._begin(name, lambda: self._backend.recv([tensor], source, tag))

    def duplicate(self, name: str) -> "TorchGroup":
        """Return a group with connections of its own."""
        self._num_duplicates += 1
        store = dist.PrefixStore(f"duplicate{self._num_duplicates} {name}", self._store)
        return TorchGroup(store, self.rank, self.size, device=self.device, timeout_s=self.timeout_s, epoch=self.epoch)

    def close(self, error: BaseException | None = None) -> None:
        """Post last words; the connections close with the process group."""
        self._board.close(f"{type(error).__name__}: {error}" if error else "")

    def _begin(self, name: str, operation: Any) -> Work:
        self._sequence += 1
        self._board.begin(self._sequence, name)
        try:
            work = operation()
        except RuntimeError as error:
            if _is_of_network(error):
                raise self._explain(error, self._sequence, name, time.monotonic()) from error
            raise _refusal(error, self._sequence, name) from error
        return _TorchWork(self, work, self._sequence, name)

    def _wait(self, work: dist.Work, sequence: int, name: str) -> None:
        began_s = time.monotonic()
        self._board.wait_in(sequence)
        try:
            if self.device.type == "cpu":
                work.wait(timedelta(seconds=self.timeout_s))
            else:
                work.wait()
        except RuntimeError as error:
            if not _is_of_network(error):
                raise _refusal(error, sequence, name) from error
            # The backend's destructor would wait for the operation that failed, a minute and more: it is never run.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))
            raise self._explain(error, sequence, name, began_s) from error
        self._board.wait_in(0)

    def _explain(self, error: RuntimeError, sequence: int, name: str, began_s: float) -> CommunicationError:
        where = f"operation {sequence} {name!r} on rank {self.rank}"
        others = self._board.describe_others(sequence)
        if time.monotonic() - began_s >= self.timeout_s:
            return PeerTimeoutError(f"{where} must finish within {self.timeout_s:g} s, but did not: {others}")
        return CommunicationError(f"{where} lost its peers: {others} (the backend says: {_first_line(error)})")


class _TorchWork(Work):
    def __init__(self, group: TorchGroup, work: dist.Work, sequence: int, name: str) -> None:
        self._group = group
        self._work = work
        self._sequence = sequence
        self._name = name

    def wait(self) -> None:
        self._group._wait(self._work, self._sequence, self._name)


# Backends tell the loss of a peer from a call they cannot do by words alone.
_NETWORK_WORDS = ("connection", "timed out", "timeout", "socket", "transport", "peer", "broken pipe", "nccl")


def _is_of_network(error: RuntimeError) -> bool:
    return any(word in str(error).lower() for word in _NETWORK_WORDS)


def _refusal(error: RuntimeError, sequence: int, name: str) -> SettingsError:
    return SettingsError(
        f"operation {sequence} {name!r} must be one that the backend can do, but it says {_first_line(error)!r}; "
        "use another dtype or device"
    )


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0].split("] ")[-1].split(". ")[0]


def _make_backend(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> "dist.ProcessGroupGloo | dist.ProcessGroupNCCL":
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
