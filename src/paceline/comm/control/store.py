"""A store of torch's over a control server."""

import base64
import contextlib
import ssl
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store

from paceline.comm.control.access import ControlAccess
from paceline.comm.control.connection import DEFAULT_PATIENCE_S, ControlClient
from paceline.comm.control.errors import ControlTimeoutError, EpochBrokenError, EpochOverError
from paceline.comm.control.frames import Message
from paceline.comm.control.key_values import epoch_prefix
from paceline.errors import SettingsError

DEFAULT_TIMEOUT_S = 300.0
_LONGEST_S = 1e9

_open: set["ControlStore"] = set()
"""Stores that are not closed. Torch's own objects hold the C++ half of a store only, and need its Python half too."""


class ControlStore(Store):
    """Keys and values of a run's control server, for all that takes a store of torch's: process groups, `PrefixStore`.

    Threads share it; one that waits for a key holds up no other. A request whose connection breaks is sent again, and
    done once.

    Args:
        access: Address and token of the server.
        timeout_s: Longest time that `get` and `wait` wait for keys.
        patience_s: Longest time to try to reach the server again before a request fails.
        access_file: File in which the access of a server lies that took the place of the first one, if one did.
        ssl_context: TLS of the client's side, if the server has it.
    """

    def __init__(
        self,
        access: ControlAccess,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        patience_s: float = DEFAULT_PATIENCE_S,
        access_file: Path | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._client = ControlClient(access, patience_s=patience_s, access_file=access_file, ssl_context=ssl_context)
        _open.add(self)

    def close(self) -> None:
        """Close its connections; nobody may use it afterwards."""
        self._client.close()
        _open.discard(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._ask("set", [key], [value], is_once=True)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the values of keys, all at once."""
        self._ask("set", keys, values, is_once=True)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, once all are there."""
        return _values(self._ask("get", keys, timeout=self._default))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._ask("wait", keys, timeout=self._default if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._ask("check", keys)["number"])

    def add(self, key: str, amount: int) -> int:
        """Add to the number that a key holds, 0 if it is not there, and return the sum."""
        return int(self._ask("add", [key], number=amount, is_once=True)["number"])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key to `desired` if it holds `expected`, or if that is empty and the key is not there.

        Returns:
            The key's value afterwards; `expected` if it is not there.
        """
        return _values(self._ask("compare_set", [key], [expected, desired], is_once=True))[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._ask("append", [key], [value], is_once=True)

    def delete_key(self, key: str) -> bool:
        """Drop a key, and return whether it was there."""
        return bool(self._ask("delete", [key], is_once=True)["number"])

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask("count")["number"])

    def has_extended_api(self) -> bool:
        """Return True: it has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> "ControlStore":
        """Return this store: threads share it."""
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # names by which torch's own objects call them

    @property
    def _default(self) -> timedelta:
        """Longest time of a wait, which torch keeps; its type stubs do not know it."""
        return self.timeout  # type: ignore[attr-defined, no-any-return]

    def announce_epoch(self, epoch: int) -> None:
        """Begin an epoch: from now on, writes to earlier ones are refused, whoever waits there is told so at once.

        Raises:
            EpochOverError: A newer one was announced.
        """
        self._ask("announce", number=epoch)

    def break_epoch(self, epoch: int) -> None:
        """Say that a worker of an epoch is lost: from now on whoever waits there for keys is told so at once."""
        self._ask("break", number=epoch)

    def check_epoch(self, epoch: int) -> None:
        """Return at once, if all workers of an epoch are there as far as is known.

        Raises:
            EpochBrokenError: One of them is lost.
            EpochOverError: A newer epoch was announced.
        """
        with contextlib.suppress(ControlTimeoutError):
            self._ask("wait", [f"{epoch_prefix(epoch)}/never set"])

    def _ask(
        self,
        do: str,
        keys: Sequence[str] = (),
        values: Sequence[str | bytes] = (),
        *,
        number: int = 0,
        timeout: timedelta | None = None,
        is_once: bool = False,
    ) -> Message:
        """Return the reply to a request; with `is_once` the server does it once, however often it arrives."""
        message: Message = {"do": do}
        if keys:
            message["keys"] = list(keys)
        if values:
            message["values"] = [_encode(value) for value in values]
        if number:
            message["number"] = number
        timeout_s = 0.0 if timeout is None else min(timeout.total_seconds(), _LONGEST_S)
        reply = self._client.request(message, timeout_s, is_once=is_once)
        if "missing" in reply:
            raise ControlTimeoutError(
                f"keys must be set within {timeout_s:g} s, but {reply['missing']} were not; check that whoever sets "
                "them still runs"
            )
        if "broken" in reply:
            raise EpochBrokenError(f"a worker of epoch {reply['broken']} was lost while others waited for it")
        if "over" in reply:
            raise EpochOverError(
                f"a worker must belong to the newest epoch of membership, {reply['epoch']}, but this one belongs to "
                f"{reply['over']}; it was replaced, and must end"
            )
        if "error" in reply:
            raise SettingsError(reply["error"])
        return reply


def store_of_epoch(store: Store, epoch: int) -> PrefixStore:
    """Return the store of an epoch : a control server refuses writes to it once a newer one is announced."""
    return PrefixStore(epoch_prefix(epoch), store)


def find_control_store(store: Store | None) -> ControlStore | None:
    """Return the control store below the prefixes of a store; None if that is another one of torch's."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, ControlStore) else None


def _encode(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _values(reply: Message) -> list[bytes]:
    return [base64.b64decode(value) for value in reply["values"]]
