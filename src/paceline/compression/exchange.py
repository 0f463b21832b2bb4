"""Exchanges of many blocks over a group: the requests of one round share one message."""

import time
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from paceline.comm.group import Group, Work
from paceline.comm.link_speed import TimedExchange
from paceline.compression.codec import (
    AllGather,
    AllReduce,
    AllToAll,
    Codec,
    CodecContext,
    Exchange,
    Exchanged,
    Request,
    State,
)

Timed = list[TimedExchange] | None
"""List of the exchanges so far; None if they are not timed."""


def exchange_blocks(
    codec: Codec,
    values: Mapping[str, Tensor],
    states: Mapping[str, State],
    group: Group,
    *,
    step: int,
    seed: int = 0,
    name: str,
    timed: Timed = None,
) -> dict[str, Exchanged]:
    """Exchange blocks with the other workers and return the results; every rank calls it with the same blocks.

    Args:
        codec: Codec of all blocks.
        values: This worker's parts of the sums, by block.
        states: State of each block; a block may be missing.
        group: Group of the workers. Nothing else may use it meanwhile.
        step: Number of updates done before.
        seed: Seed of the run.
        name: Name of the exchange in errors.
        timed: List to which the collectives are appended with the bytes that this worker sends; None for no times.
    """
    under_way: dict[str, Exchange] = {}
    requests: dict[str, Request] = {}
    for block, value in values.items():
        context = CodecContext(block, step, group.rank, group.size, seed)
        under_way[block] = codec.exchange(value, states.get(block, {}), context)
        requests[block] = next(under_way[block])
    done: dict[str, Exchanged] = {}
    while requests:
        answers = _answer(requests, group, name, timed)
        requests = {}
        for block, answer in answers.items():
            try:
                requests[block] = under_way[block].send(answer)
            except StopIteration as end:
                done[block] = end.value
    return {block: done[block] for block in values}


def wait_timed(work: Work, sent_bytes: float, timed: Timed) -> None:
    """Wait for a collective that has just begun, and append it to `timed`, if that is given."""
    began_s = time.perf_counter()
    work.wait()
    if timed is not None:
        timed.append(TimedExchange(round(sent_bytes), began_s, time.perf_counter()))


def _answer(requests: Mapping[str, Request], group: Group, name: str, timed: Timed) -> dict[str, Tensor]:
    """Run one round: at most one collective of each kind and dtype, the same on every rank."""
    answers: dict[str, Tensor] = {}
    reduced = {block: request for block, request in requests.items() if isinstance(request, AllReduce)}
    for dtype in sorted({request.payload.dtype for request in reduced.values()}, key=str):
        answers |= _reduce({b: r.payload for b, r in reduced.items() if r.payload.dtype == dtype}, group, name, timed)
    answers |= _gather({b: r.payload for b, r in requests.items() if isinstance(r, AllGather)}, group, name, timed)
    answers |= _scatter({b: r.payload for b, r in requests.items() if isinstance(r, AllToAll)}, group, name, timed)
    return answers


def _reduce(payloads: Mapping[str, Tensor], group: Group, name: str, timed: Timed) -> dict[str, Tensor]:
    together = _join(payloads)
    sent_bytes = 2 * (group.size - 1) / group.size * together.nbytes
    wait_timed(group.all_reduce(together, name=f"{name} sums"), sent_bytes, timed)
    return _cut(together, payloads)


def _gather(payloads: Mapping[str, Tensor], group: Group, name: str, timed: Timed) -> dict[str, Tensor]:
    if not payloads:
        return {}
    together = _join(payloads)
    gathered = together.new_empty(group.size, len(together))
    work = group.all_gather(gathered, together, name=f"{name} payloads")
    wait_timed(work, (group.size - 1) * together.nbytes, timed)
    return _cut(gathered, payloads)


def _scatter(payloads: Mapping[str, Tensor], group: Group, name: str, timed: Timed) -> dict[str, Tensor]:
    if not payloads:
        return {}
    together = _join(payloads)
    received = torch.empty_like(together)
    work = group.all_to_all(received, together, name=f"{name} parts")
    wait_timed(work, (group.size - 1) / group.size * together.nbytes, timed)
    return _cut(received, payloads)


def _join(payloads: Mapping[str, Tensor]) -> Tensor:
    parts = list(payloads.values())
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _cut(together: Tensor, payloads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each block's part, contiguous, so that its bytes can be viewed as numbers of any dtype."""
    sizes = [payload.shape[-1] for payload in payloads.values()]
    parts = cast(list[Tensor], together.split(sizes, dim=-1))
    if together.dtype == torch.uint8 and len(parts) > 1:
        parts = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    return dict(zip(payloads, parts, strict=True))
