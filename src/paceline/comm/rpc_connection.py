"""Headers and bodies over a link of two ranks: the transport of requests and replies."""

import struct
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from paceline.comm.group import MAX_TAG, Group, Work

_FIELDS = struct.Struct("<6q2d")
"""Kind, size of the body (negative if it is in shared memory), clock, version, start, stop; weight, value."""
_HEADER_TAG = 0


@dataclass(frozen=True)
class RpcHeader:
    """The part of a request or reply beside its body.

    Args:
        kind: Kind of the request: a number that the service defines, at least 0.
        clock: Clock of the sender.
        version: Version of the parameters that the body holds, or was computed from.
        start: First index of a range.
        stop: End of the range.
        weight: Number of samples, or tokens, that the body is a sum over.
        value: Any other number.
    """

    kind: int
    clock: int = 0
    version: int = 0
    start: int = 0
    stop: int = 0
    weight: float = 0.0
    value: float = 0.0


RpcReply = tuple[RpcHeader, Tensor]
"""A header and its body: uint8, 1-dim."""
NOTHING = torch.empty(0, dtype=torch.uint8)


class RpcConnection:
    """Messages over a link of two ranks, which take turns.

    If both ends share memory, the other end reads a body in the `outbox` from there: only its header is sent. The body
    must stay unchanged until the other end has sent its next message.

    A message from the other end shows that it has received everything sent to it before. So the wait for a send comes
    only after the next one has begun, when it costs no time. The receive of a body of the usual size is posted before
    its header has come, so that the sender need not ask whether it may begin.
    """

    def __init__(self, link: Group, name: str, outbox: Tensor, inbox: Tensor) -> None:
        self.link = link
        self.outbox = outbox
        """Memory for this end's bodies that the other end sees; empty if no memory is shared."""
        self.inbox = inbox
        """Outbox of the other end."""
        self._peer = 1 - link.rank
        self._name = name
        self._headers = [bytearray(_FIELDS.size), bytearray(_FIELDS.size)]
        """Headers to send, in turns: one may still be under way."""
        self._received = bytearray(_FIELDS.size)
        self._works: list[Work] = []
        self._awaited: tuple[Tensor, Work] | None = None
        """Posted receive of a body that has not been sent yet."""

    def send(self, header: RpcHeader, body: Tensor) -> None:
        """Begin to send; the message before has arrived."""
        self._headers.reverse()
        kind, *fields = astuple(header)
        is_there = 0 < len(body) <= len(self.outbox) and body.data_ptr() == self.outbox.data_ptr()
        _FIELDS.pack_into(self._headers[0], 0, kind, -len(body) if is_there else len(body), *fields)
        sent = torch.frombuffer(self._headers[0], dtype=torch.uint8)
        works, self._works = self._works, []
        self._works.append(self.link.send(sent, self._peer, tag=_HEADER_TAG, name=f"{self._name}: header"))
        if len(body) and not is_there:
            self._works.append(self.link.send(body, self._peer, tag=_tag_of(body), name=f"{self._name}: body"))
        for work in works:
            work.wait()

    def wait_until_sent(self) -> None:
        """Wait for the last message."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def receive(self, usual: Tensor) -> RpcReply:
        """Return the next message; its body lies in `usual` if it has that size and is not in the inbox."""
        received = torch.frombuffer(self._received, dtype=torch.uint8)
        work = self.link.receive(received, self._peer, tag=_HEADER_TAG, name=f"{self._name}: header")
        if len(usual) and not len(self.inbox) and self._awaited is None:
            self._awaited = usual, self._await(usual)
        work.wait()
        kind, num_bytes, *fields = _FIELDS.unpack_from(self._received)
        return RpcHeader(kind, *fields), self._receive_body(num_bytes)

    def _receive_body(self, num_bytes: int) -> Tensor:
        if num_bytes <= 0:
            return self.inbox[:-num_bytes] if num_bytes else NOTHING
        if self._awaited is not None and len(self._awaited[0]) == num_bytes:
            (body, work), self._awaited = self._awaited, None
        else:
            body = torch.empty(num_bytes, dtype=torch.uint8)
            work = self._await(body)
        work.wait()
        return body

    def _await(self, body: Tensor) -> Work:
        return self.link.receive(body, self._peer, tag=_tag_of(body), name=f"{self._name}: body")


def _tag_of(body: Tensor) -> int:
    """Return the tag of bodies of that size, so that a posted receive takes no body of another size."""
    return _HEADER_TAG + 1 + len(body) % MAX_TAG
