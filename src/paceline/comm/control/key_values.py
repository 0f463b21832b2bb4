"""Keys and values of a control server: what it answers to each request. No I/O, and no clock.

Keys below ``paceline/epochN/`` belong to epoch N of membership. Once a newer epoch is announced, they can be read, but
what is written there is refused: a worker that was frozen, and does not know that it was replaced, disturbs nobody. The
keys of older epochs than the one before are dropped, so that memory does not grow with the number of epochs. Once a
worker of an epoch is known to be lost, nobody waits any more for keys that are not there: that worker may be the one
that would have set them.
"""

import base64
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.comm.control.errors import ControlError
from paceline.comm.control.frames import Message

_NUM_REMEMBERED = 4096
_EPOCH_PREFIX = "paceline/epoch"


class Request(BaseModel):
    """A request of a store.

    Args:
        do: Kind of the request.
        keys: Keys that it reads or writes.
        values: Values that it writes, in base64.
        number: Number that it adds, or the epoch that it announces, or a worker of which it says is lost.
        timeout_s: Longest time to wait for the keys.
        id: Name that no other request has: one that comes again, since its reply was lost, is done once.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    do: Literal["set", "get", "wait", "check", "add", "compare_set", "append", "delete", "count", "announce", "break"]
    keys: list[str] = []
    values: list[str] = []
    number: int = 0
    timeout_s: float = 0.0
    id: str = ""


class Waiting:
    """A request that waits for keys.

    Args:
        request: The request.
        missing: Keys that are not there yet.
    """

    def __init__(self, request: Request, missing: set[str]) -> None:
        self.request = request
        self.missing = missing
        self.finish: Callable[[Message], None] | None = None
        """Function that is called with the reply."""


class KeyValues:
    """A store of bytes by key."""

    def __init__(self) -> None:
        self.epoch = 0
        """Newest epoch that was announced."""
        self.broken = -1
        """Newest epoch of which a worker is known to be lost; -1 if there is none."""
        self.note: Callable[[Message], None] = lambda _: None
        """Function that is told of each request that has changed something, before its reply is sent."""
        self._shared: dict[str, bytes] = {}
        self._by_epoch: dict[int, dict[str, bytes]] = {}
        self._waiting: dict[str, list[Waiting]] = {}
        self._replies: OrderedDict[str, Message] = OrderedDict()
        """Last replies to requests that would do something else a second time."""

    def handle(self, message: Message) -> Message | Waiting:
        """Do what a request asks, and return the reply, or the request if it must wait.

        Raises:
            ControlError: The message is no request.
        """
        try:
            request = Request.model_validate(message)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            raise ControlError(f"a request must fit its form, but {problem['loc']}: {problem['msg']}") from error
        if request.id in self._replies:
            return self._replies[request.id]
        if (over := self._refuse_old(request)) is not None:
            return over
        if request.do in ("get", "wait"):
            return self._read_or_wait(request)
        try:
            reply = _ANSWERS[request.do](self, request)
        except (ValueError, IndexError) as error:
            raise ControlError(f"a request must give a value in base64 for each key, but: {error}") from error
        if request.id:
            self._remember(request.id, reply)
        if request.id or request.do not in ("check", "count"):
            self.note(message)
        return reply

    def list_requests(self) -> list[Message]:
        """Return messages for `repeat` that lead from nothing to the present keys."""
        spaces = [self._shared, *self._by_epoch.values()]
        pairs = [(key, base64.b64encode(value).decode()) for space in spaces for key, value in space.items()]
        messages: list[Message] = [{"do": "set", "keys": [key], "values": [value]} for key, value in pairs]
        messages.append({"do": "announce", "number": self.epoch})
        if self.broken >= 0:
            messages.append({"do": "break", "number": self.broken})
        return [*messages, {"replies": list(self._replies.items())}]

    def repeat(self, message: Message) -> None:
        """Do again what a request has done that was noted, or that `list_requests` has returned.

        Raises:
            ControlError: The message is none of these.
        """
        if "replies" not in message:
            self.handle(message)
            return
        try:
            self._replies = OrderedDict(message["replies"])
        except (TypeError, ValueError) as error:
            raise ControlError(f"replies must come in pairs of id and reply, but: {error}") from error

    def _remember(self, name: str, reply: Message) -> None:
        self._replies[name] = reply
        if len(self._replies) > _NUM_REMEMBERED:
            self._replies.popitem(last=False)

    def forget(self, waiting: Waiting) -> None:
        """Drop a request that waits no longer."""
        for key in waiting.missing:
            left = [other for other in self._waiting.get(key, []) if other is not waiting]
            if left:
                self._waiting[key] = left
            else:
                self._waiting.pop(key, None)

    def _refuse_old(self, request: Request) -> Message | None:
        """Return the reply to a request that would write, or wait, in an epoch that is over."""
        if request.do == "check":
            return None
        only_reads = request.do in ("get", "wait")
        for key in request.keys:
            epoch = _epoch_of(key)
            if epoch is not None and epoch < self.epoch and not (only_reads and key in self._space_of(key)):
                return {"over": epoch, "epoch": self.epoch}
        return None

    def _read_or_wait(self, request: Request) -> Message | Waiting:
        missing = self._find_missing(request)
        if not missing:
            return self._read(request)
        if any(_epoch_of(key) == self.broken for key in missing):
            return {"broken": self.broken}
        if request.timeout_s <= 0:
            return {"missing": sorted(missing)}
        waiting = Waiting(request, missing)
        self._enter(waiting)
        return waiting

    def _find_missing(self, request: Request) -> set[str]:
        return {key for key in request.keys if key not in self._space_of(key)}

    def _enter(self, waiting: Waiting) -> None:
        for key in waiting.missing:
            self._waiting.setdefault(key, []).append(waiting)

    def _read(self, request: Request) -> Message:
        if request.do == "wait":
            return {}
        return {"values": [base64.b64encode(self._space_of(key)[key]).decode() for key in request.keys]}

    def _set(self, request: Request) -> Message:
        for key, value in list(zip(request.keys, map(_decode, request.values), strict=True)):
            self._put(key, value)
        return {}

    def _check(self, request: Request) -> Message:
        return {"number": int(all(key in self._space_of(key) for key in request.keys))}

    def _add(self, request: Request) -> Message:
        key = request.keys[0]
        try:
            number = int(self._space_of(key).get(key, b"0")) + request.number
        except ValueError:
            return {"error": f"a key that is added to must hold a number, but {key!r} does not; choose another key"}
        self._put(key, str(number).encode())
        return {"number": number}

    def _compare_set(self, request: Request) -> Message:
        key, expected, desired = request.keys[0], _decode(request.values[0]), _decode(request.values[1])
        found = self._space_of(key).get(key, b"")
        if found == expected:
            self._put(key, desired)
            found = desired
        elif key not in self._space_of(key):
            found = expected  # as torch's own stores answer
        return {"values": [base64.b64encode(found).decode()]}

    def _append(self, request: Request) -> Message:
        key = request.keys[0]
        self._put(key, self._space_of(key).get(key, b"") + _decode(request.values[0]))
        return {}

    def _delete(self, request: Request) -> Message:
        key = request.keys[0]
        return {"number": int(self._space_of(key).pop(key, None) is not None)}

    def _count(self, request: Request) -> Message:
        return {"number": len(self._shared) + sum(map(len, self._by_epoch.values()))}

    def _announce(self, request: Request) -> Message:
        if request.number < self.epoch:
            return {"over": request.number, "epoch": self.epoch}
        self.epoch = request.number
        for epoch in [epoch for epoch in self._by_epoch if epoch < self.epoch - 1]:
            del self._by_epoch[epoch]
        for one in self._list_waiting():
            if (over := self._refuse_old(one.request)) is not None:
                self._finish(one, over)
        return {}

    def _break(self, request: Request) -> Message:
        self.broken = max(self.broken, request.number)
        for one in self._list_waiting():
            if any(_epoch_of(key) == self.broken for key in one.missing):
                self._finish(one, {"broken": self.broken})
        return {}

    def _list_waiting(self) -> list[Waiting]:
        return [*{id(one): one for several in self._waiting.values() for one in several}.values()]

    def _put(self, key: str, value: bytes) -> None:
        self._space_of(key, is_written=True)[key] = value
        for waiting in self._waiting.pop(key, []):
            waiting.missing.discard(key)
            if not waiting.missing:
                waiting.missing |= self._find_missing(waiting.request)  # one that was there may have been deleted
                self._enter(waiting)
            if not waiting.missing:
                self._finish(waiting, self._read(waiting.request))

    def _finish(self, waiting: Waiting, reply: Message) -> None:
        self.forget(waiting)
        if waiting.finish is not None:
            waiting.finish(reply)

    def _space_of(self, key: str, *, is_written: bool = False) -> dict[str, bytes]:
        """Return the keys and values among which a key is."""
        epoch = _epoch_of(key)
        if epoch is None:
            return self._shared
        return self._by_epoch.setdefault(epoch, {}) if is_written else self._by_epoch.get(epoch, {})


_ANSWERS: dict[str, Callable[[KeyValues, Request], Message]] = {
    "set": KeyValues._set,
    "check": KeyValues._check,
    "add": KeyValues._add,
    "compare_set": KeyValues._compare_set,
    "append": KeyValues._append,
    "delete": KeyValues._delete,
    "count": KeyValues._count,
    "announce": KeyValues._announce,
    "break": KeyValues._break,
}
"""Answers to the requests that need not wait."""


def epoch_prefix(epoch: int) -> str:
    """Return the beginning of the keys of an epoch, for torch's `PrefixStore`."""
    return f"{_EPOCH_PREFIX}{epoch}"


def _epoch_of(key: str) -> int | None:
    """Return the epoch that a key belongs to; None for keys that all epochs share."""
    if not key.startswith(_EPOCH_PREFIX):
        return None
    number, slash, _ = key[len(_EPOCH_PREFIX) :].partition("/")
    return int(number) if slash and number.isascii() and number.isdigit() and len(number) < 19 else None


def _decode(value: str) -> bytes:
    return base64.b64decode(value, validate=True)
