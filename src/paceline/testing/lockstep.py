"""The exchanges of N workers, run in lockstep by one thread: a codec's full exchange without a group."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

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


def exchange_all(
    codec: Codec,
    values: Sequence[Tensor],
    states: Sequence[State] | None = None,
    *,
    step: int = 0,
    block: str = "block",
    seed: int = 0,
    requests: list[Request] | None = None,
) -> list[Exchanged]:
    """Run the exchange of one block among ``len(values)`` workers, in this thread, and return the results by rank.

    Args:
        codec: Codec of the block.
        values: Value of each worker, to be summed.
        states: State of each worker's codec for the block; empty by default.
        step: Number of updates before.
        block: Name of the parameter.
        seed: Random seed of the run.
        requests: A list that the first worker's requests are appended to, copied before they are answered.
    """
    size = len(values)
    kept = states if states is not None else [{}] * size
    running = [
        codec.exchange(value, state, CodecContext(block, step, rank, size, seed))
        for rank, (value, state) in enumerate(zip(values, kept, strict=True))
    ]
    asked, results = _advance(running, [None] * size)
    while asked:
        if requests is not None:
            requests.append(replace(asked[0], payload=asked[0].payload.clone()))
        asked, results = _advance(running, _answer(asked))
    return results


def _advance(running: Sequence[Exchange], answers: Sequence[Tensor | None]) -> tuple[list[Request], list[Exchanged]]:
    """Advance every worker to its next request, or all of them to their results."""
    asked: list[Request] = []
    results: list[Exchanged] = []
    for worker, answer in zip(running, answers, strict=True):
        try:
            asked.append(next(worker) if answer is None else worker.send(answer))
        except StopIteration as end:
            results.append(end.value)
    assert not (asked and results), f"{len(results)} workers are done while {len(asked)} ask for another round"
    return asked, results


def _answer(asked: Sequence[Request]) -> list[Tensor]:
    """Return the answer for each worker, each with its own copy, as from a network."""
    kinds = {(type(request), request.payload.dtype, request.payload.shape) for request in asked}
    assert len(kinds) == 1, f"workers must ask for the same, but asked for {kinds}"
    payloads = [request.payload for request in asked]
    first = asked[0]
    if isinstance(first, AllReduce):
        assert first.payload.dim() == 1, f"what is reduced must be 1-dim, but has shape {tuple(first.payload.shape)}"
        total = payloads[0].clone()
        for payload in payloads[1:]:
            total += payload
        return [payload.copy_(total) for payload in payloads]
    assert first.payload.dtype == torch.uint8, f"what is gathered must be uint8, but is {first.payload.dtype}"
    together = torch.stack(payloads)
    if isinstance(first, AllGather):
        return [together.clone() for _ in payloads]
    assert isinstance(first, AllToAll)
    assert len(first.payload) == len(asked), f"a row for each of {len(asked)} workers, but {len(first.payload)} rows"
    return [together[:, rank].clone() for rank in range(len(asked))]
