"""What a codec puts on the wire between two: one worker's blocks on their way to another, or to a server.

A codec says how a sum of many workers is exchanged. A message is the exchange of a world of one, written down by who
sends it: whoever has the payloads gets the same total out of them, whatever its own value would have been.
"""

from collections.abc import Mapping

import torch
from torch import Size, Tensor

from paceline.compression.codec import AllReduce, AllToAll, Codec, CodecContext, Exchange, Exchanged, Request, State


def encode_blocks(
    codec: Codec, values: Mapping[str, Tensor], states: Mapping[str, State], *, step: int, seed: int = 0
) -> tuple[Tensor, dict[str, Exchanged]]:
    """Return a message of blocks, and what came of each: its total is what whoever gets the message decodes.

    Args:
        codec: How they are encoded.
        values: The blocks: fp32, of any shape.
        states: What was kept of each; a block may be missing.
        step: Distinguishes messages of one sender; with `seed` it seeds what is random.
        seed: Of the run.

    Returns:
        The message, uint8, 1-dim, of `message_bytes` elements; and the new states, to be kept once it was delivered.
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
        codec: The sender's.
        message: What `encode_blocks` made of blocks of those shapes, in the same order, with the same step and seed.
        shapes: By block.
        step: The sender's.
        seed: The sender's.
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
    if isinstance(request, AllToAll):  # what an owner makes of these parts is encoded again: only that is sent
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
