"""How a group runs a program: messages of at most one segment, each of which leaves as soon as its data are there.

There is no barrier between rounds (`message_order`): adding overlaps receiving, and a segment travels on while the
next one is still under way. Receives are posted well ahead, since a message crosses the network only once its
receive is posted.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paceline.comm.group import MAX_TAG, Group, Work
from paceline.comm.message_order import MessageOrder, Places, order_messages
from paceline.errors import SettingsError
from paceline.programs.base import Collective, Program, chunk_bounds

SEGMENT_BYTES = (2**16, 2**19)
"""Bounds of the default segment size, which is an eighth of the buffer."""
WINDOW_BYTES = 2**23
"""Most bytes of posted receives on a rank: as much as a fast network with full queues holds."""
AHEAD_SEGMENTS = 1
"""Segments that may still be under way when sends of a later round begin: enough to keep a link busy between ranks."""

_HAVE_OUTPUT = (Collective.ALL_GATHER, Collective.ALL_TO_ALL)
BufferView = Callable[[int, int], Tensor]
"""Function that returns the elements from `begin` to `end` of the buffer that a program runs on."""


class Scratch:
    """Memory for received segments that are to be added; one thread at a time uses it, again and again."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device, int], list[Tensor]] = {}

    def take(self, like: Tensor, num_elements: int) -> Tensor:
        """Return a tensor of `num_elements`."""
        free = self._free.setdefault((like.dtype, like.device, num_elements), [])
        return free.pop() if free else like.new_empty(num_elements)

    def give_back(self, tensor: Tensor) -> None:
        """Return `tensor` to the free ones."""
        self._free[tensor.dtype, tensor.device, len(tensor)].append(tensor)


def execute(
    program: Program,
    tensor: Tensor,
    group: Group,
    *,
    output: Tensor | None = None,
    name: str,
    segment_bytes: int | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Run a program over a group by messages alone, and return when this rank has finished.

    Every rank calls it with tensors of the same shape, and nothing else may use the group meanwhile. Sums are bitwise
    equal on all ranks.

    Args:
        program: Program for as many ranks as the group has.
        tensor: Contiguous tensor. All-reduce, reduce-scatter, broadcast, and all-gather without `output` run in place.
        group: Group that sends the messages, with tags from its `next_tag` on. Its own collectives are never used
            instead.
        output: Contiguous output. All-gather: ``output[r]`` becomes rank r's `tensor`. All-to-all: ``output[r]``
            becomes row ``tensor[group.rank]`` of rank r.
        name: Name of the operation in errors.
        segment_bytes: Largest size of a message, the same on every rank; by default chosen from the buffer's size.
        scratch: Memory to reuse in the next call.

    Raises:
        SettingsError: The tensors do not fit the program; nothing was sent.
        CommunicationError: A peer died or stopped answering. The group is closed with this error, so that the call
            fails on every rank. The contents of `tensor` (or `output`) are then undefined, and nothing writes to it any
            more.
    """
    check_tensors(program, tensor, output, segment_bytes)
    if program.num_ranks != group.size:
        raise SettingsError(
            f"a program must be for the ranks of its group, but got one for {program.num_ranks} in a group of "
            f"{group.size}; build it for {group.size}"
        )
    target = tensor if output is None else output
    if program.num_ranks == 1 or target.numel() == 0:
        if output is not None:
            output.copy_(tensor.view_as(output))
        return
    if segment_bytes is None:
        segment_bytes = min(max(target.nbytes // 8, SEGMENT_BYTES[0]), SEGMENT_BYTES[1])
    row = target.numel() // group.size if output is not None else None
    order = _order(program, group.rank, target.numel(), row, segment_bytes, target.element_size())
    if program.collective == Collective.ALL_TO_ALL:
        assert output is not None
        memory: BufferView = _AllToAllRows(tensor, output, group.rank).span
    else:
        if output is not None:
            output[group.rank].copy_(tensor)
        flat = target.view(-1)
        memory = lambda begin, end: flat[begin:end]  # noqa: E731
    group.begin(name)
    first_tag = group.next_tag
    group.next_tag = (first_tag + order.num_tags) % (MAX_TAG + 1)
    try:
        _Execution(order, memory, group, name, first_tag, scratch or Scratch()).run()
    except BaseException as error:
        group.close(error)
        raise


def check_tensors(program: Program, tensor: Tensor, output: Tensor | None, segment_bytes: int | None) -> None:
    """Raise `SettingsError` where `execute` cannot run the program on these tensors."""
    if not tensor.is_contiguous() or (output is not None and not output.is_contiguous()):
        raise SettingsError("the tensors of a program must be contiguous, but are not; call contiguous() before")
    if segment_bytes is not None and segment_bytes < 1:
        raise SettingsError(f"segment_bytes must be at least 1, but got {segment_bytes}; give the bytes of a message")
    collective, size = program.collective, program.num_ranks
    if collective == Collective.ALL_TO_ALL and output is None:
        raise SettingsError(f"{collective} must have an output, but got none; allocate one like the tensor")
    if collective not in _HAVE_OUTPUT and output is not None:
        raise SettingsError(f"{collective} must have no output, but got one; it runs in the tensor")
    if output is None:
        return
    shape = tensor.shape if collective == Collective.ALL_TO_ALL else (size, *tensor.shape)
    if output.shape != shape or output.shape[:1] != (size,) or output.dtype != tensor.dtype:
        raise SettingsError(
            f"the output of {collective} among {size} ranks must be {tensor.dtype} with a row for each rank, but got "
            f"{tuple(output.shape)} {output.dtype} for {tuple(tensor.shape)} {tensor.dtype}; allocate another"
        )


@functools.lru_cache(maxsize=256)
def _order(
    program: Program, rank: int, num_elements: int, row: int | None, segment_bytes: int, element_bytes: int
) -> MessageOrder:
    places = _places(program, num_elements, row)
    segment = max(1, segment_bytes // element_bytes)
    window = max(2, WINDOW_BYTES // segment_bytes)
    return order_messages(program, rank, places, segment=segment, window=window, ahead=AHEAD_SEGMENTS * segment)


def _places(program: Program, num_elements: int, row: int | None) -> Places:
    """Return where chunks lie: in a flat buffer, or in rows of `row` elements, one for each rank or pair of ranks."""
    num_chunks, num_ranks = program.num_chunks, program.num_ranks
    if program.collective == Collective.ALL_TO_ALL:
        assert row is not None
        return Places(np.arange(num_chunks) * row, np.full(num_chunks, row), is_sequence=False)
    if row is None:
        bounds = chunk_bounds(num_elements, num_chunks)
        return Places(bounds[:-1], np.diff(bounds), is_sequence=True)
    assert program.owners is not None
    share, rest = divmod(num_chunks, num_ranks)
    order = np.argsort(program.owners, kind="stable")
    if rest or (program.owners[order] != np.repeat(np.arange(num_ranks), share)).any():
        raise SettingsError(
            f"an all-gather of equal parts must have the same number of chunks for each rank, but {program.name} has "
            f"{num_chunks} for {num_ranks} ranks; leave num_chunks out"
        )
    bounds = chunk_bounds(row, share)
    begins, sizes = np.empty(num_chunks, np.int64), np.empty(num_chunks, np.int64)
    begins[order] = (np.arange(num_ranks)[:, None] * row + bounds[:-1]).ravel()
    sizes[order] = np.tile(np.diff(bounds), num_ranks)
    return Places(begins, sizes, is_sequence=bool((order == np.arange(num_chunks)).all()))


class _AllToAllRows:
    """Rows of an all-to-all by (source, destination): this rank's own, those for it, and those it forwards."""

    def __init__(self, tensor: Tensor, output: Tensor, rank: int) -> None:
        output[rank].copy_(tensor[rank])
        self._rank, self._size, self._row = rank, len(tensor), tensor[0].numel()
        self._mine, self._output = tensor.view(len(tensor), -1), output.view(len(tensor), -1)
        self._passing: dict[int, Tensor] = {}

    def span(self, begin: int, end: int) -> Tensor:
        """Return elements `begin` to `end` of all rows laid end to end; the span lies within one row."""
        chunk, offset = divmod(begin, self._row)
        source, destination = divmod(chunk, self._size)
        if source == self._rank:
            row = self._mine[destination]
        elif destination == self._rank:
            row = self._output[source]
        else:
            if chunk not in self._passing:
                self._passing[chunk] = self._mine.new_empty(self._row)
            row = self._passing[chunk]
        return row[offset : offset + end - begin]


class _Execution:
    """One execution of a rank's messages."""

    def __init__(
        self,
        order: MessageOrder,
        memory: BufferView,
        group: Group,
        name: str,
        first_tag: int,
        scratch: Scratch,
    ) -> None:
        self._order = order
        self._memory = memory
        self._group = group
        self._name = name
        self._first_tag = first_tag
        self._scratch = scratch
        self._sending: dict[int, Work] = {}
        self._receiving: dict[int, tuple[Work, Tensor]] = {}

    def run(self) -> None:
        for index, step in enumerate(self._order.steps):
            if index:
                self._take(index - 1)
            for receive in step.posts:
                self._post(receive)
            for send in step.sends:
                self._send(send)
            for receive in step.late_posts:
                self._end(self._order.receives[receive].overwrites)
                self._post(receive)
        self._group.wait_for(list(self._sending.values()))

    def _post(self, index: int) -> None:
        receive = self._order.receives[index]
        place = self._memory(receive.begin, receive.end)
        held = place if receive.is_direct else self._scratch.take(place, self._order.num_scratch)
        tag = self._tag(receive.tag)
        work = self._group.receive(held[: len(place)], receive.peer, tag=tag, name=self._name)
        self._receiving[index] = work, held

    def _take(self, index: int) -> None:
        receive = self._order.receives[index]
        work, held = self._receiving.pop(index)
        work.wait()
        if receive.is_direct:
            return
        self._end(receive.overwrites)
        place = self._memory(receive.begin, receive.end)
        if receive.adds:
            place += held[: len(place)]
        else:
            place.copy_(held[: len(place)])
        self._scratch.give_back(held)

    def _send(self, index: int) -> None:
        send = self._order.sends[index]
        tensor = self._memory(send.begin, send.end)
        self._sending[index] = self._group.send(tensor, send.peer, tag=self._tag(send.tag), name=self._name)

    def _end(self, sends: tuple[int, ...]) -> None:
        for index in sends:
            if index in self._sending:
                self._sending.pop(index).wait()

    def _tag(self, tag: int) -> int:
        return (self._first_tag + tag) % (MAX_TAG + 1)
