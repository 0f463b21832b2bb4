"""A group whose collectives are programs."""

import weakref
from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.comm.channel import Channel
from paceline.comm.execute import Scratch, check_tensors, execute
from paceline.comm.group import DoneWork, Group, Work
from paceline.comm.program_choice import ProgramChoice
from paceline.comm.proven_program import build_program
from paceline.programs import Algorithm, Collective, HalvingDoubling, Program, RecursiveDoubling, find_algorithm


class ProgramGroup(Group):
    """Runs one algorithm's programs over another group, in order, in a thread of its own.

    The programs run on a duplicate of the group, and never use the group's own collectives. Collectives that the
    algorithm lacks (see `Algorithm.collectives`), and everything in a world of one, run on the group itself; `needs`
    lists those that must be programs. The group also sends messages and allocates buffers. The group's owner closes it:
    closing a program group closes the duplicate, and the group itself only to report an error.

    A program of a user's own is proved before it runs, and must be the same on all ranks: those of `needs` when the
    group is made, others when they are first used.

    Args:
        group: Group that can send messages; every rank makes its `ProgramGroup` at the same time.
        algorithm: Settings of an algorithm, or its name.
        needs: Collectives that must be programs.
        segment_bytes: Largest size of a message; see `execute`.
        is_tuned: Whether small all-reduces may run by `recursive_doubling`, where that is faster and adds in the same
            order: with halving-doubling among a power of two of ranks.
        runs_here: Whether an operation runs in the thread that begins it, and is done when that call returns: for a
            caller that would wait anyway.

    Raises:
        SettingsError: There is no such algorithm, or it lacks a collective of `needs` for that number of ranks.
        ProgramError: A program of `needs` is wrong.
    """

    def __init__(
        self,
        group: Group,
        algorithm: Algorithm | str,
        *,
        needs: Collection[Collective] = (),
        segment_bytes: int | None = None,
        is_tuned: bool = False,
        runs_here: bool = False,
    ) -> None:
        super().__init__(group.rank, group.size, group.device, group.epoch, group.names)
        self.algorithm = find_algorithm(algorithm)() if isinstance(algorithm, str) else algorithm
        self._group = group
        self._needs = tuple(needs)
        self._segment_bytes = segment_bytes
        self._programs: dict[tuple[Collective, int], Program] = {
            (collective, 0): build_program(self.algorithm, collective, group) for collective in sorted(needs)
        }
        self._scratch = Scratch()
        self._messages = group.duplicate(f"{self.algorithm.name} program")
        self._owned: list[Group] = [self._messages]
        self._duplicates: weakref.WeakSet[ProgramGroup] = weakref.WeakSet()
        self._channel = None if runs_here else Channel(f"paceline-{self.algorithm.name}")
        self._is_tuned = is_tuned
        self._choice: ProgramChoice | None = None
        if is_tuned and isinstance(self.algorithm, HalvingDoubling) and group.size & (group.size - 1) == 0:
            few_rounds = RecursiveDoubling().build(Collective.ALL_REDUCE, group.size)
            few_bytes = self.algorithm.build(Collective.ALL_REDUCE, group.size)
            self._choice = ProgramChoice(few_rounds, few_bytes, self._gather_now)

    def all_reduce(self, tensor: Tensor, *, name: str) -> Work:
        """Run the program, or the group's own collective."""
        if self._runs(Collective.ALL_REDUCE):
            return self._submit(Collective.ALL_REDUCE, tensor, None, name)
        return self._group.all_reduce(tensor, name=name)

    def broadcast(self, tensor: Tensor, *, source: int = 0, name: str) -> Work:
        """Run the program, or the group's own collective."""
        if self._runs(Collective.BROADCAST):
            return self._submit(Collective.BROADCAST, tensor, None, name, root=source)
        return self._group.broadcast(tensor, source=source, name=name)

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Run the program, or the group's own collective."""
        if self._runs(Collective.ALL_GATHER):
            return self._submit(Collective.ALL_GATHER, tensor, output, name)
        return self._group.all_gather(output, tensor, name=name)

    def all_to_all(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Run the program, or the group's own collective."""
        if self._runs(Collective.ALL_TO_ALL):
            return self._submit(Collective.ALL_TO_ALL, tensor, output, name)
        return self._group.all_to_all(output, tensor, name=name)

    def send(self, tensor: Tensor, destination: int, *, tag: int, name: str) -> Work:
        """Send over the group."""
        return self._group.send(tensor, destination, tag=tag, name=name)

    def receive(self, tensor: Tensor, source: int, *, tag: int, name: str) -> Work:
        """Receive over the group."""
        return self._group.receive(tensor, source, tag=tag, name=name)

    def duplicate(self, name: str) -> "ProgramGroup":
        """Return a group of the same algorithm over a duplicate of the group."""
        base = self._group.duplicate(name)
        duplicate = ProgramGroup(
            base,
            self.algorithm,
            needs=self._needs,
            segment_bytes=self._segment_bytes,
            is_tuned=self._is_tuned,
            runs_here=self._channel is None,
        )
        duplicate._owned.append(base)
        self._duplicates.add(duplicate)
        return duplicate

    def subgroup(self, ranks: Sequence[int], name: str) -> Group:
        """Return a subgroup of the group, without programs."""
        return self._group.subgroup(ranks, name)

    def link(self, peer: int, name: str) -> Group:
        """Return a link of the group."""
        return self._group.link(peer, name)

    def on_cpu(self) -> Group:
        """Return this group if its device is the CPU, else the group's own `on_cpu`."""
        return self if self.device.type == "cpu" else self._group.on_cpu()

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer of the group."""
        return self._group.allocate(num_elements, dtype)

    def close(self, error: BaseException | None = None) -> None:
        """Close the channel and the duplicate; with an `error`, also the group itself."""
        for owned in (*self._duplicates, *self._owned):
            owned.close(error)
        if error is not None:
            self._group.close(error)
        if self._channel is not None:
            self._channel.close()

    def _runs(self, collective: Collective) -> bool:
        return self.size > 1 and collective in self.algorithm.collectives

    def _submit(self, collective: Collective, tensor: Tensor, output: Tensor | None, name: str, root: int = 0) -> Work:
        if (collective, root) not in self._programs:
            self._programs[collective, root] = build_program(self.algorithm, collective, self._group, root=root)
        program = self._programs[collective, root]
        check_tensors(program, tensor, output, self._segment_bytes)

        def run(chosen: Program) -> None:
            execute(
                chosen,
                tensor,
                self._messages,
                output=output,
                name=name,
                segment_bytes=self._segment_bytes,
                scratch=self._scratch,
            )

        job = partial(run, program)
        if self._choice is not None and collective == Collective.ALL_REDUCE:
            job = partial(self._choice.run, tensor.nbytes, run)
        if self._channel is not None:
            return self._channel.submit(job)
        job()
        return DoneWork()

    def _gather_now(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks; called in the channel, by all ranks between the same operations."""
        output = tensor.new_empty(self.size, *tensor.shape)
        program = self.algorithm.build(Collective.ALL_GATHER, self.size)
        execute(program, tensor, self._messages, output=output, name="times of programs")
        return output
