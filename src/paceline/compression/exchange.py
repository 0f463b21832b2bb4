"""Exchanges of many blocks over a group: the requests of one round share one message."""

import itertools
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from paceline.comm.group import Group
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
        answers = _answer(requests, group, name, tail if is_known else None)
        tail = None if is_known else tail
        requests = {}
        for block, answer in answers.items():
            try:
                requests[block] = under_way[block].send(answer)
            except StopIteration as end:
                done[block] = end.value
    if tail is not None:
        group.all_reduce(tail, name=f"{name} flags").wait()
    return {block: done[block] for block in values}


def _is_finite(request: Request) -> Flag | None:
    """Return whether a worker's part is finite, as its last request says."""
    return None if isinstance(request, AllToAll) else request.is_finite


def _answer(requests: Mapping[str, Request], group: Group, name: str, tail: Tensor | None) -> dict[str, Tensor]:
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
        answers |= _reduce({block: payload for block, payload in sums.items() if payload.dtype == dtype}, group, name)
    answers |= _gather(gathers, group, name) | _scatter(parts, group, name)
    if tail is not None:
        summed = answers.pop(_TAIL)
        tail.copy_(summed.sum(dim=0) if _TAIL in gathers else summed)
    return answers


def _reduce(payloads: Mapping[str, Tensor], group: Group, name: str) -> dict[str, Tensor]:
    together = _join(payloads)
    group.all_reduce(together, name=f"{name} sums").wait()
    return _cut(together, payloads)


def _gather(payloads: Mapping[str, Tensor], group: Group, name: str) -> dict[str, Tensor]:
    if not payloads:
        return {}
    together = _join(payloads)
    gathered = together.new_empty(group.size, len(together))
    group.all_gather(gathered, together, name=f"{name} payloads").wait()
    return _cut(gathered, payloads)


def _scatter(payloads: Mapping[str, Tensor], group: Group, name: str) -> dict[str, Tensor]:
    if not payloads:
        return {}
    together = _join(payloads)
    received = torch.empty_like(together)
    group.all_to_all(received, together, name=f"{name} parts").wait()
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
