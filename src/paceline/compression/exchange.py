"""Exchanges of many blocks over a group: the requests of one round share one message."""

import itertools
import time
from collections.abc import Callable, Mapping
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
    Flag,
    Request,
    State,
    all_of,
)

_TAIL = ""
"""Name of the tail among the blocks: no parameter has it."""
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
    tail: Tensor | None = None,
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
        tail: Flags of 0 or 1, in fp32, that become their sums over all workers. The last one becomes the number of
            workers of which some block is not finite. They travel with the last round, if its requests say so.
        timed: List to which the collectives are appended with the bytes that this worker sends; None for no times.
    """
    num_rounds = max((len(codec.payloads(value.shape, group.size)) for value in values.values()), default=0)
    under_way: dict[str, Exchange] = {}
    requests: dict[str, Request] = {}
    for block, value in values.items():
        context = CodecContext(block, step, group.rank, group.size, seed)
        under_way[block] = codec.exchange(value, states.get(block, {}), context)
        requests[block] = next(under_way[block])
    done: dict[str, Exchanged] = {}
    for left in itertools.count(num_rounds, -1):
        is_known = left == 1 and not any(_is_finite(request) is None for request in requests.values())
        if tail is not None and (is_known or not requests):
            known = (_is_finite(request) for request in requests.values())
            parts = [each.is_finite for each in done.values()] + [flag for flag in known if flag is not None]
            tail[-1] = all_of(parts) ^ True
        if not requests:
            break
        answers = _answer(requests, group, name, tail if is_known else None, timed)
        tail = None if is_known else tail
        requests = {}
        for block, answer in answers.items():
            try:
                requests[block] = under_way[block].send(answer)
            except StopIteration as end:
                done[block] = end.value
    if tail is not None:
        sent_bytes = 2 * (group.size - 1) / group.size * tail.nbytes
        _run(lambda: group.all_reduce(tail, name=f"{name} flags"), sent_bytes, timed)
    return {block: done[block] for block in values}


def _is_finite(request: Request) -> Flag | None:
    """Return whether a worker's part is finite, as its last request says."""
    return None if isinstance(request, AllToAll) else request.is_finite


def _run(begin: Callable[[], Work], sent_bytes: float, timed: Timed) -> None:
    """Run a collective, all of which `begin` may do by itself, and append it to `timed`, if that is given."""
    began_s = time.perf_counter()
    begin().wait()
    if timed is not None:
        timed.append(TimedExchange(round(sent_bytes), began_s, time.perf_counter()))


def _answer(
    requests: Mapping[str, Request], group: Group, name: str, tail: Tensor | None, timed: Timed
) -> dict[str, Tensor]:
    """Run one round: at most one collective of each kind and dtype, the same on every rank; one of them sums `tail`."""
    answers: dict[str, Tensor] = {}
    sums = {block: request.payload for block, request in requests.items() if isinstance(request, AllReduce)}
    gathers = {block: request.payload for block, request in requests.items() if isinstance(request, AllGather)}
    parts = {block: request.payload for block, request in requests.items() if isinstance(request, AllToAll)}
    if tail is not None and gathers and not any(payload.dtype == torch.float32 for payload in sums.values()):
        gathers[_TAIL] = tail.to(torch.uint8)
    elif tail is not None:
        sums[_TAIL] = tail
    for dtype in sorted({payload.dtype for payload in sums.values()}, key=str):
        same = {block: payload for block, payload in sums.items() if payload.dtype == dtype}
        answers |= _reduce(same, group, name, timed)
    answers |= _gather(gathers, group, name, timed) | _scatter(parts, group, name, timed)
    if tail is not None:
        summed = answers.pop(_TAIL)
        tail.copy_(summed.sum(dim=0) if _TAIL in gathers else summed)
    return answers


def _reduce(payloads: Mapping[str, Tensor], group: Group, name: str, timed: Timed) -> dict[str, Tensor]:
    together = _join(payloads)
    sent_bytes = 2 * (group.size - 1) / group.size * together.nbytes
    _run(lambda: group.all_reduce(together, name=f"{name} sums"), sent_bytes, timed)
    return _cut(together, payloads)


def _gather(payloads: Mapping[str, Tensor], group: Group, name: str, timed: Timed) -> dict[str, Tensor]:
    if not payloads:
        return {}
    together = _join(payloads)
    gathered = together.new_empty(group.size, len(together))
    sent_bytes = (group.size - 1) * together.nbytes
    _run(lambda: group.all_gather(gathered, together, name=f"{name} payloads"), sent_bytes, timed)
    return _cut(gathered, payloads)


def _scatter(payloads: Mapping[str, Tensor], group: Group, name: str, timed: Timed) -> dict[str, Tensor]:
    if not payloads:
        return {}
    together = _join(payloads)
    received = torch.empty_like(together)
    sent_bytes = (group.size - 1) / group.size * together.nbytes
    _run(lambda: group.all_to_all(received, together, name=f"{name} parts"), sent_bytes, timed)
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
