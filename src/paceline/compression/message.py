"""The message of a codec from one sender to one receiver: one worker's blocks for another worker, or for a server.

A codec describes how a sum of many workers is exchanged. A message is the exchange of a world of one, written down by
the sender: a receiver of the payloads gets the same total from them, whatever its own value is.
"""

from collections.abc import Mapping

import torch
from torch import Size, Tensor

from paceline.compression.codec import AllReduce, AllToAll, Codec, CodecContext, Exchange, Exchanged, Request, State


def encode_blocks(
    codec: Codec, values: Mapping[str, Tensor], states: Mapping[str, State], *, step: int, seed: int = 0
) -> tuple[Tensor, dict[str, Exchanged]]:
    """Return a message of blocks, and the result of each: its total is what the receiver decodes.

    Args:
        codec: Codec of all blocks.
        values: Blocks to send: fp32, of any shape.
        states: State of each block; a block may be missing.
        step: Number that differs between messages of one sender; with `seed` it seeds random numbers.
        seed: Seed of the run.

    Returns:
        Message of `message_bytes` elements (uint8, 1-dim), and the new states, to be kept once it was delivered.
    """
    payloads: list[Tensor] = []
    done = {}
    for block, value in values.items():
        exchange = codec.exchange(value.contiguous(), states.get(block, {}), _make_context(block, step, seed))
        done[block] = _run(exchange, payloads, None)
    return (torch.cat(payloads) if payloads else torch.zeros(0, dtype=torch.uint8)), done


def decode_blocks(
    codec: Codec, message: Tensor, shapes: Mapping[str, Size], *, step: int, seed: int = 0
) -> dict[str, Tensor]:
    """Return the blocks of a message.

    Args:
        codec: Codec of the sender.
        message: Message of `encode_blocks` for blocks of those shapes, in the same order, with the same step and seed.
        shapes: Shape of each block.
        step: Step of the sender.
        seed: Seed of the sender.
    """
    sizes = [size for shape in shapes.values() for size in _sent_bytes(codec, shape)]
    payloads = list(message.split(sizes))
    decoded = {}
    for block, shape in shapes.items():
        nothing = torch.zeros(shape, dtype=torch.float32, device=message.device)
        exchange = codec.exchange(nothing, {}, _make_context(block, step, seed))
        num_sent = len(_sent_bytes(codec, shape))
        mine, payloads = payloads[:num_sent], payloads[num_sent:]
        decoded[block] = _run(exchange, [], mine).total
    return decoded


def message_bytes(codec: Codec, shapes: Mapping[str, Size]) -> int:
    """Return the size of a message of blocks of those shapes."""
    return sum(size for shape in shapes.values() for size in _sent_bytes(codec, shape))


def _run(exchange: Exchange, sent: list[Tensor], received: list[Tensor] | None) -> Exchanged:
    """Run an exchange of a world of one, on its own payloads or on those `received`."""
    answer: Tensor | None = None
    while True:
        try:
            request = next(exchange) if answer is None else exchange.send(answer)
        except StopIteration as end:
            result: Exchanged = end.value
            return result
        answer = _answer(request, sent, received)


def _answer(request: Request, sent: list[Tensor], received: list[Tensor] | None) -> Tensor:
    payload = request.payload
    if isinstance(request, AllToAll):  # the owner's encoding of the parts follows: only that is sent
        return payload
    if received is None:
        sent.append(payload.clone().view(-1).view(torch.uint8))
    else:
        payload = received.pop(0).clone().view(payload.dtype).view(payload.shape)
    return payload if isinstance(request, AllReduce) else payload.unsqueeze(0)


def _sent_bytes(codec: Codec, shape: Size) -> list[int]:
    return [size for kind, size in codec.payloads(shape, 1) if kind is not AllToAll]


def _make_context(block: str, step: int, seed: int) -> CodecContext:
    return CodecContext(block, step, rank=0, num_workers=1, seed=seed)
