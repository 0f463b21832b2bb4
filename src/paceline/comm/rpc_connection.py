"""Headers and bodies over a link of two: how requests and replies travel."""

import struct
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from paceline.comm.group import MAX_TAG, Group, Work

_FIELDS = struct.Struct("<6q2d")
"""Kind, size of the body (negative where it is in shared memory), clock, version, start, stop; weight, value."""
_HEADER_TAG = 0


@dataclass(frozen=True)
class RpcHeader:
    """What a request or reply says beside its body.

    Args:
        kind: What is asked for: a number of the service's own, at least 0.
        clock: Of whoever sends it.
        version: Of what the body holds, or was made from.
        start: First of a range.
        stop: End of a range.
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
    """Messages over a link of two, which take turns.

    Where both ends share memory, a body that lies in the `outbox` is read from there: only its header is sent. It must
    stay as it is until the other end has sent its next message.

    Whatever the other end says next, it has received what was sent to it before: so a send is waited for only
    after the next one was begun, when that costs no time. A body of the usual size is awaited before its header has
    come, so that the sender need not ask whether it may begin.
    """

    def __init__(self, link: Group, name: str, outbox: Tensor, inbox: Tensor) -> None:
        self.link = link
        self.outbox = outbox
        """Memory of this end's bodies that the other end sees; empty where none is shared."""
        self.inbox = inbox
        """The other end's outbox."""
        self._peer = 1 - link.rank
        self._name = name
        self._headers = [bytearray(_FIELDS.size), bytearray(_FIELDS.size)]
        """What is sent, in turns: one may still be on its way."""
        self._received = bytearray(_FIELDS.size)
        self._works: list[Work] = []
        self._awaited: tuple[Tensor, Work] | None = None
        """A body that was not sent yet."""

    def send(self, header: RpcHeader, body: Tensor) -> None:
        """Begin to send; what was sent before has arrived."""
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
        """Wait for the last."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def receive(self, usual: Tensor) -> RpcReply:
        """Return what is sent next; its body lies in `usual` if it is of that size, and not in the inbox."""
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
    """Return the tag of bodies of that size: one that is awaited is not mistaken for another."""
    return _HEADER_TAG + 1 + len(body) % MAX_TAG
