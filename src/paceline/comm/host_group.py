"""A group of ranks on several hosts: shared memory inside a host, messages between the hosts' leaders."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.channel import Channel
from paceline.comm.group import Group, Work
from paceline.comm.hang_watch import Verdict
from paceline.comm.heartbeat import HeartbeatBoard
from paceline.comm.local_group import LocalGroup
from paceline.comm.program_group import ProgramGroup
from paceline.comm.shared_memory import (
    SharedMemoryError,
    SharedMemoryGroup,
    exchange_documents,
    host_key,
    raise_together,
)
from paceline.comm.shared_memory.control_segment import SMALL_BYTES
from paceline.comm.shared_memory.transfers import check_rows, check_sum, check_tensor, flatten
from paceline.comm.threads import call_weakly
from paceline.comm.torch_group import TorchGroup
from paceline.errors import CommunicationError, MismatchError, PeerTimeoutError
from paceline.programs.base import Algorithm


def choose_algorithm(num_hosts: int) -> str:
    """Return the name of the algorithm by which the leaders of hosts sum large tensors by default."""
    return "ring" if num_hosts & (num_hosts - 1) else "halving_doubling"


class HostGroup(Group):
    """Ranks that are processes of several hosts, in any order and any number on each.

    The first rank of each host is its leader. Large tensors are summed inside each host, then among the leaders by a
    collective program, and copied to the other ranks of the host: each host sends as much as one rank would. Broadcast
    and all-gather go through the leaders too. All-to-all (which sends no byte twice anyway), messages and small
    operations use a `TorchGroup` of all ranks; small sums run on it by `recursive_doubling`.

    Args:
        store: Store by which the ranks find each other; all its keys belong to this group (give it a prefix).
        rank: Rank of this process.
        size: Number of ranks.
        timeout_s: Longest time of an operation before `PeerTimeoutError`.
        epoch: Number of the membership that the group belongs to.
        algorithm: Algorithm of the leaders' programs; by default halving-doubling, which takes the fewest steps, if
            their number is a power of two, and for small tensors recursive doubling where that is faster, as the first
            steps show; else the ring, which then sends the least.
        host: Key that is the same on all ranks of a host; by default `host_key`.
        names: Number of each rank in errors.

    Raises:
        SharedMemoryError: The ranks of some host cannot share memory; raised on all ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        epoch: int = 0,
        algorithm: Algorithm | str | None = None,
        host: str | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, size, torch.device("cpu"), epoch, names)
        self.timeout_s = timeout_s
        self.store: dist.Store = store
        self._key = host or host_key()
        keys = exchange_documents(dist.PrefixStore("hosts", store), rank, size, self._key, timeout_s, self.names)
        self._hosts = [[other for other in range(size) if keys[other] == key] for key in dict.fromkeys(keys)]
        self._here = next(number for number, ranks in enumerate(self._hosts) if rank in ranks)
        self._neighbours = self._open_host()
        self._everyone = self._open_network("everyone", range(size))
        self._small = ProgramGroup(self._everyone, "recursive_doubling")
        num_hosts = len(self._hosts)
        self._is_tuned = algorithm is None
        self._algorithm = algorithm or choose_algorithm(num_hosts)
        self._leaders: ProgramGroup | None = None
        """Group of the leaders; None on other ranks."""
        self._parts: list[Group] = [self._neighbours, self._small, self._everyone]
        if rank == self._hosts[self._here][0]:
            links = self._open_network("leaders", [ranks[0] for ranks in self._hosts])
            self._leaders = ProgramGroup(links, self._algorithm, is_tuned=self._is_tuned)
            self._parts = [self._neighbours, self._leaders, links, self._small, self._everyone]
        self._verdict: Verdict | None = None
        self._board = HeartbeatBoard(dist.PrefixStore("board", store), rank, self.names, call_weakly(self._end_by))
        self._sequence = 0
        self._channel = Channel("paceline-hosts", on_wait=self._board.wait_in, waiters_run=True)
        self._duplicates: list[Group] = []
        self._subgroups: list[Group] = []

    def all_reduce(self, tensor: Tensor, *, name: str) -> Work:
        """Sum inside the host, among the leaders, and copy the sum to the others of the host."""
        flat = flatten(tensor, name)
        check_sum(flat.dtype)
        if flat.nbytes <= SMALL_BYTES:
            return self._small.all_reduce(tensor, name=name)

        def run() -> None:
            self._neighbours.all_reduce(flat, name=name).wait()
            if self._leaders is not None:
                self._leaders.all_reduce(flat, name=name).wait()
            self._neighbours.broadcast(flat, name=name).wait()

        return self._submit(name, run)

    def broadcast(self, tensor: Tensor, *, source: int = 0, name: str) -> Work:
        """Copy inside the source's host, to the other leaders, and inside their hosts."""
        flat = flatten(tensor, name)
        if flat.nbytes <= SMALL_BYTES:
            return self._everyone.broadcast(tensor, source=source, name=name)
        origin = next(number for number, ranks in enumerate(self._hosts) if source in ranks)

        def run() -> None:
            if origin == self._here:
                self._neighbours.broadcast(flat, source=self._hosts[origin].index(source), name=name).wait()
            if self._leaders is not None:
                self._leaders.broadcast(flat, source=origin, name=name).wait()
            if origin != self._here:
                self._neighbours.broadcast(flat, name=name).wait()

        return self._submit(name, run)

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Gather inside the host, among the leaders, and copy everything to the others of the host."""
        check_tensor(tensor, name)
        check_rows(output, self.size, tensor.nbytes, name)
        if tensor.nbytes <= SMALL_BYTES:
            return self._everyone.all_gather(output, tensor, name=name)
        mine = tensor.detach().contiguous().view(-1)

        def run() -> None:
            longest = max(map(len, self._hosts))  # smaller hosts send rows that are never read
            blocks = torch.empty(len(self._hosts), longest, len(mine), dtype=mine.dtype)
            block = torch.empty(longest, len(mine), dtype=mine.dtype)
            self._neighbours.all_gather(block[: self._neighbours.size], mine, name=name).wait()
            if self._leaders is not None:
                self._leaders.all_gather(blocks, block, name=name).wait()
            self._neighbours.broadcast(blocks, name=name).wait()
            rows = output.view(self.size, len(mine))
            for ranks, theirs in zip(self._hosts, blocks, strict=True):
                rows[ranks] = theirs[: len(ranks)]

        return self._submit(name, run)

    def all_to_all(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Exchange rows over the network."""
        return self._everyone.all_to_all(output, tensor, name=name)

    def send(self, tensor: Tensor, destination: int, *, tag: int, name: str) -> Work:
        """Send over the network."""
        return self._everyone.send(tensor, destination, tag=tag, name=name)

    def receive(self, tensor: Tensor, source: int, *, tag: int, name: str) -> Work:
        """Receive over the network."""
        return self._everyone.receive(tensor, source, tag=tag, name=name)

    def begin(self, name: str) -> None:
        """Record it in the network group, which sends the messages."""
        self._everyone.begin(name)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed buffer that the ranks of a host share."""
        return self._neighbours.allocate(num_elements, dtype)

    def leave_losses_to_supervisor(self) -> None:
        """Let a supervisor find out who is lost, in all parts."""
        super().leave_losses_to_supervisor()
        for part in self._parts:
            part.leave_losses_to_supervisor()

    @property
    def host_ranks(self) -> list[int]:
        """Ranks of this host."""
        return self._hosts[self._here]

    def share(self, num_bytes: Mapping[int, int]) -> dict[int, Tensor]:
        """Return the buffers of the ranks of this host."""
        here = self.host_ranks
        shared = self._neighbours.share({place: num_bytes[rank] for place, rank in enumerate(here)})
        return {here[place]: buffer for place, buffer in shared.items()}

    def duplicate(self, name: str) -> "HostGroup":
        """Return a group with its own memory and connections."""
        store = dist.PrefixStore(f"duplicate{len(self._duplicates)} {name}", self.store)
        duplicate = HostGroup(
            store,
            self.rank,
            self.size,
            timeout_s=self.timeout_s,
            epoch=self.epoch,
            algorithm=None if self._is_tuned else self._algorithm,
            host=self._key,
            names=self.names,
        )
        self._duplicates.append(duplicate)
        return duplicate

    def subgroup(self, ranks: Sequence[int], name: str) -> Group:
        """Return a shared-memory group if all `ranks` are on one host, else a host group."""
        place = self.place_in(ranks)
        here = self._hosts[self._here]
        if set(ranks) <= set(here):
            return self._neighbours.subgroup([here.index(rank) for rank in ranks], name)
        store = dist.PrefixStore(self._name_subgroup(ranks, name), self.store)
        subgroup = HostGroup(
            store,
            place,
            len(ranks),
            timeout_s=self.timeout_s,
            epoch=self.epoch,
            host=self._key,
            names=self.names_of(ranks),
        )
        self._subgroups.append(subgroup)
        return subgroup

    def link(self, peer: int, name: str) -> Group:
        """Return a link over the network."""
        return self._everyone.link(peer, name)

    def close(self, error: BaseException | None = None) -> None:
        """Leave when all operations have ended; with an `error`, at once."""
        for duplicate in (*self._duplicates, *self._subgroups):
            duplicate.close(error)
        if error is not None:
            self._close_parts(error)
        self._channel.close(self._close_parts if error is None else None)
        self._board.close(f"{type(error).__name__}: {error}" if error else "")

    def _open_host(self) -> Group:
        """Return the group of this rank's host."""
        ranks = self._hosts[self._here]
        local: Group = LocalGroup(epoch=self.epoch)
        reason = None
        try:
            if len(ranks) > 1:
                store = dist.PrefixStore(f"host{self._here}", self.store)
                place = ranks.index(self.rank), len(ranks)
                local = SharedMemoryGroup(
                    store, *place, timeout_s=self.timeout_s, epoch=self.epoch, names=self.names_of(ranks)
                )
        except SharedMemoryError as error:
            reason = str(error)
        store = dist.PrefixStore("shared", self.store)
        raise_together(exchange_documents(store, self.rank, self.size, reason, self.timeout_s, self.names))
        return local

    def _open_network(self, name: str, ranks: Sequence[int]) -> TorchGroup:
        return TorchGroup(
            dist.PrefixStore(name, self.store),
            ranks.index(self.rank),
            len(ranks),
            device=self.device,
            timeout_s=self.timeout_s,
            epoch=self.epoch,
            names=self.names_of(ranks),
        )

    def _close_parts(self, error: BaseException | None = None) -> None:
        for part in self._parts:
            part.close(error)

    def _submit(self, name: str, function: Callable[[], None]) -> Work:
        self._sequence += 1
        sequence = self._sequence
        self._board.begin(sequence, name)

        def run() -> None:
            try:
                function()
            except CommunicationError as error:
                raise self._explain(error, sequence, name) from error
            except MismatchError as error:
                self._close_parts(error)  # or the other hosts would wait
                raise

        return self._channel.submit(run, sequence)

    def _end_by(self, verdict: Verdict) -> None:
        """End all operations here, with an error that names the ranks that hang or have ended."""
        self._verdict = verdict
        self._close_parts(verdict.to_error(f"operation {self._sequence} on rank {self.names[self.rank]}"))

    def _explain(self, error: CommunicationError, sequence: int, name: str) -> CommunicationError:
        """Return the error with all hosts' ranks in it, and close the connections so that the others notice."""
        where = f"operation {sequence} {name!r} on rank {self.names[self.rank]}"
        if self._verdict is not None:
            return self._verdict.to_error(where)
        if isinstance(error, PeerTimeoutError):
            others = self._board.describe_others(sequence)
            self._close_parts(error)  # only now, so that ranks that began later reach their own time-out
            return PeerTimeoutError(f"{where} must finish within {self.timeout_s:g} s, but did not: {others}")
        self._close_parts(error)
        return CommunicationError(f"{where} lost its peers: {self._board.describe_others(sequence)}")
