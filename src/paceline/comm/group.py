"""A group of workers and its operations: the few collectives that Paceline is built on."""

import json
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.membership import PREEMPTED, Membership
from paceline.errors import SettingsError

MAX_TAG = 2**31 - 2
"""Largest tag of a message."""


class Work(ABC):
    """An operation that has begun."""

    began_s: float | None = None
    """Time at which the operation began, by `time.perf_counter`; None if unknown."""
    ended_s: float | None = None
    """Time at which the operation ended, by `time.perf_counter`; None if unknown."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the tensors of the operation hold the result (on a GPU: until it is queued there).

        Raises:
            PeerTimeoutError: The operation did not finish in time; the message says where each rank is.
            CommunicationError: A peer died.
        """

    def check(self) -> None:
        """Raise if the operation was aborted, so that its result, which has been read, must not be used."""


class DoneWork(Work):
    """An operation that has finished already."""

    def wait(self) -> None:
        """Return at once."""


class Group(ABC):
    """A fixed set of ranks that run the same operations in the same order.

    A group is immutable and belongs to one `epoch` of membership. Every operation has a sequence number and a
    name, by which errors say where each rank is. Operations return at once; leave their tensors alone until
    `Work.wait` has returned.
    """

    store: dist.Store | None = None
    """Store by which the ranks found each other, if they are processes; other connections may be set up over it."""
    timeout_s: float = 60.0
    """Longest time that an operation may take."""
    is_supervised: bool = False
    """Whether a supervisor finds out who was lost, so that errors, which take a second to look for it, need not."""

    def __init__(
        self, rank: int, size: int, device: torch.device, epoch: int = 0, names: Sequence[int] | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.names = list(names or range(size))
        """Number of each rank in errors: the one it has in the outermost group that this one is a subgroup of."""
        self.device = device
        self.epoch = epoch
        self._num_opened: Counter[str] = Counter()
        self.membership = Membership()
        """Membership of this worker; only that of the joined group is used."""
        self.next_tag = 0
        """First tag of the next program (`execute`); the same on every rank."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, *, name: str) -> Work:
        """Replace `tensor` by its sum over all ranks, bitwise equal on all of them."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, *, source: int = 0, name: str) -> Work:
        """Replace `tensor` by the tensor of rank `source`."""

    @abstractmethod
    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Fill ``output[r]`` with the `tensor` of rank r; output has shape ``(size, *tensor.shape)``."""

    @abstractmethod
    def all_to_all(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Fill ``output[r]`` with row ``tensor[self.rank]`` of rank r; both have shape ``(size, ...)``."""

    @abstractmethod
    def send(self, tensor: Tensor, destination: int, *, tag: int, name: str) -> Work:
        """Send `tensor` (contiguous) to another rank, whose `receive` has the same tag, dtype and number of elements.

        Tags are in [0, MAX_TAG]. Messages with different tags may overtake each other; messages between two ranks with
        the same tag arrive in the order of sending. The work may not finish before the message is received, and the
        caller must wait for it.

        Raises:
            SettingsError: `destination` or `tag` is invalid, or the group cannot send from that device.
        """

    @abstractmethod
    def receive(self, tensor: Tensor, source: int, *, tag: int, name: str) -> Work:
        """Fill `tensor` (contiguous) with the message that rank `source` sends under `tag`; see `send`."""

    def wait_for(self, works: Sequence[Work]) -> None:
        """Wait for some of this group's operations; see `Work.wait`."""
        for work in works:
            work.wait()

    @abstractmethod
    def duplicate(self, name: str) -> "Group":
        """Return a group of the same ranks whose operations are independent of this group's.

        Every rank calls it, in the same order. The duplicate may be used from another thread while this group is in
        use. Its owner closes it; closing this group closes it too.
        """

    @abstractmethod
    def subgroup(self, ranks: Sequence[int], name: str) -> "Group":
        """Return a group of some of these ranks, including this one; its rank i is ``ranks[i]`` here.

        Only those ranks call it, with the same `ranks` in ascending order and the same `name`; subgroups of one name
        are opened in the same order on all their ranks. A subgroup fails alone: when one of its ranks dies, this group
        and other subgroups go on. Closing this group closes it.
        """

    def link(self, peer: int, name: str) -> "Group":
        """Return a group of this rank and `peer`, for messages; the lower of both is rank 0 there.

        Both ranks call it. A rank that opens several links opens them in the order of ranks, which avoids deadlock.
        """
        return self.subgroup(sorted((self.rank, peer)), name)

    def on_cpu(self) -> "Group":
        """Return a group of the same ranks for tensors in host memory: this group, if its device is the CPU.

        Messages need it. Every rank calls it, in the same order. It is opened once, and closed with this group.
        """
        return self

    def _name_subgroup(self, ranks: Sequence[int], name: str) -> str:
        """Return a name that no earlier subgroup has, the same on each of `ranks`."""
        opened = f"{name} of {','.join(map(str, ranks))}"
        self._num_opened[opened] += 1
        return f"subgroup {self._num_opened[opened]} {opened}"

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """Leave the group; an `error` is reported to the other ranks as the reason."""

    def begin(self, name: str) -> None:
        """Record that this rank begins an operation of many messages, so that errors can say where it is."""

    def leave_losses_to_supervisor(self) -> None:
        """Let a supervisor find out who is lost: errors of operations, also of groups made from now on, only say it."""
        self.is_supervised = True

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed buffer that operations use without a copy. Every rank calls it, in the same order."""
        return torch.zeros(num_elements, dtype=dtype, device=self.device)

    @property
    def host_ranks(self) -> list[int]:
        """Ranks that can share memory with this one, itself included."""
        return [self.rank]

    def share(self, num_bytes: Mapping[int, int]) -> dict[int, Tensor]:
        """Return zeroed byte buffers that all ranks of a host see, by rank; empty where memory is not shared.

        Every rank calls it, in the same order. The caller decides who writes where.

        Args:
            num_bytes: Size of the buffer of each of `host_ranks`, the same on all of them. Each rank allocates its own.
        """
        return {}

    def barrier(self, *, name: str = "barrier") -> None:
        """Return when every rank has called it."""
        here = torch.zeros(1, device=self.device)
        self.all_reduce(here, name=name).wait()
        here.tolist()  # on a GPU wait() only queues

    def gather_documents(self, document: Any, *, name: str) -> list[Any]:
        """Return the JSON documents of all ranks, by rank. Control messages are JSON, never pickle."""
        if self.size == 1:
            return [document]
        payload = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, 1, dtype=torch.int64, device=self.device)
        length = torch.tensor([len(payload)], device=self.device)
        self.all_gather(lengths, length, name=f"{name} lengths").wait()
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(payload)] = payload.to(self.device)
        gathered = torch.zeros(self.size, longest, dtype=torch.uint8, device=self.device)
        self.all_gather(gathered, padded, name=name).wait()
        rows = gathered.cpu().numpy()
        return [json.loads(row[: int(count)].tobytes()) for row, count in zip(rows, lengths, strict=True)]

    def check_message(self, peer: int, tag: int) -> None:
        """Raise `SettingsError` if no message to or from `peer` can have this `tag`."""
        if not 0 <= peer < self.size or peer == self.rank:
            raise SettingsError(
                f"the peer of a message must be another rank of 0..{self.size - 1}, but got {peer} on rank {self.rank}"
            )
        if not 0 <= tag <= MAX_TAG:
            raise SettingsError(f"the tag of a message must be in [0, {MAX_TAG}], but got {tag}")

    def names_of(self, ranks: Sequence[int]) -> list[int]:
        """Return the numbers that errors use for `ranks`."""
        return [self.names[rank] for rank in ranks]

    def place_in(self, ranks: Sequence[int]) -> int:
        """Return this rank's index in `ranks`, those of a subgroup.

        Raises:
            SettingsError: This rank is not among them, or they are not ascending ranks of this group.
        """
        if list(ranks) != sorted(set(ranks) & set(range(self.size))) or self.rank not in ranks:
            raise SettingsError(
                f"the ranks of a subgroup must ascend in 0..{self.size - 1} with {self.rank} among them, "
                f"but got {list(ranks)}"
            )
        return list(ranks).index(self.rank)

    def __enter__(self) -> Self:
        _entered.groups = [*getattr(_entered, "groups", ()), self]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the group; if a signal has stopped all workers, end the process with exit code 75 (`SystemExit`).

        Raises:
            SystemExit: A signal has stopped all workers.
            PacelineError: The block ended by an error of torch that a layout explains.
        """
        is_loop_left = isinstance(error, SystemExit) and self.membership.is_stopping  # see Loader
        error = None if is_loop_left else error
        _entered.groups = _entered.groups[:-1]
        reason = self.membership.explain(error) if error is not None else None
        try:
            if error is None:
                self.membership.close_replicas()
                self.membership.leave()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self.close(error)
        if error is None and self.membership.is_stopping and not is_loop_left:
            raise SystemExit(PREEMPTED)
        if reason is not None:
            raise reason from error


_entered = threading.local()
_joined: list[weakref.ref[Group]] = []


def note_joined(group: Group) -> None:
    """Make `group` the default group of the replicas and loaders of this process."""
    _joined[:] = [weakref.ref(group)]


def joined_group() -> Group | None:
    """Return the group of this thread's innermost ``with`` block, else the group that the process has joined."""
    entered = getattr(_entered, "groups", ())
    if entered:
        return entered[-1]  # type: ignore[no-any-return]
    return _joined[0]() if _joined else None
