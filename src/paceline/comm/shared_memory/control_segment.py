"""The segment that the ranks of a host share from the start: the flight recorder, and two rings."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.connecting import check_epoch
from paceline.comm.progress import PROGRESS
from paceline.comm.shared_memory.flight_recorder import BLOCK_BYTES, FlightRecorder
from paceline.comm.shared_memory.rendezvous import Hub, exchange_documents, find_obstacle, raise_together
from paceline.comm.shared_memory.ring import SharedRing
from paceline.comm.shared_memory.segment import Segment, create, reserve, round_to_pages

# Small operations run in the caller's thread, with many slots; large ones in a thread of their own, with few. The
# large slots of all ranks should fit the cache together.
SMALL_BYTES = 16 * 2**10
_SMALL_SLOTS = 16
_LARGE_BYTES = 2**20
_LARGE_SLOTS = 6


@dataclass(frozen=True)
class ControlSegment:
    """This rank's handles of the shared segment."""

    hub: Hub
    recorder: FlightRecorder
    small: SharedRing
    large: SharedRing


def open_control_segment(
    store: dist.Store, rank: int, names: Sequence[int], timeout_s: float, epoch: int = 0
) -> ControlSegment:
    """Connect to the other ranks of a host, and share memory with them; errors number ranks by `names`.

    Raises:
        SharedMemoryError: Some rank cannot share memory; raised on all ranks.
        CommunicationError: Some rank did not connect, or is known to be lost.
    """
    size = len(names)
    hub, obstacle, address, descriptor = Hub(rank, size), find_obstacle(), None, None
    num_bytes = round_to_pages(size * (BLOCK_BYTES + _SMALL_SLOTS * SMALL_BYTES + _LARGE_SLOTS * _LARGE_BYTES))
    try:
        if rank == 0 and obstacle is None:
            descriptor = create(num_bytes)
            reserve(descriptor, 0, num_bytes)
            address = hub.open()
    except OSError as error:
        obstacle = str(error)

    def exchange(name: str, document: object) -> list[Any]:
        return exchange_documents(dist.PrefixStore(name, store), rank, size, document, timeout_s, names)

    check = partial(check_epoch, store, epoch)
    try:
        documents = exchange("open", [obstacle, address])
        raise_together([document[0] for document in documents])
        try:
            with PROGRESS.connecting([name for name in names if name != names[rank]]):
                hub.connect(documents[0][1], check)
                descriptor = hub.share(descriptor, timeout_s, check)
            control = _divide(hub, Segment(descriptor, num_bytes), descriptor, rank, names, timeout_s)
        except OSError as error:
            obstacle = str(error)
            hub.close()
        raise_together(exchange("map", obstacle))
    except BaseException:
        hub.close()
        if descriptor is not None:
            os.close(descriptor)
        raise
    control.recorder.own_descriptor()
    return control


def _divide(
    hub: Hub, segment: Segment, descriptor: int, rank: int, names: Sequence[int], timeout_s: float
) -> ControlSegment:
    size = len(names)
    memory = torch.frombuffer(segment.buffer, dtype=torch.uint8)
    recorder = FlightRecorder(memoryview(segment.buffer).cast("B"), segment.address, descriptor, rank, names, timeout_s)
    first = size * BLOCK_BYTES
    small = SharedRing(
        0, recorder, memory, first=first, num_slots=_SMALL_SLOTS, slot_bytes=SMALL_BYTES, is_callers_thread=True
    )
    first += size * _SMALL_SLOTS * SMALL_BYTES
    large = SharedRing(
        1, recorder, memory, first=first, num_slots=_LARGE_SLOTS, slot_bytes=_LARGE_BYTES, is_callers_thread=False
    )
    return ControlSegment(hub, recorder, small, large)
