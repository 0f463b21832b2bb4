"""A limit of what this process sends over the network, so that others find room on the same link."""

import threading
import time
import weakref
from collections.abc import Callable

HEADERS = 1.05
"""Bytes at the interface to bytes of a message: frames of 1,500 bytes have headers, and what comes is acknowledged."""
SLICE_BYTES = 2**20
"""Largest part of a tensor that leaves at the speed of the link; then the others' turn comes."""


class TokenBucket:
    """Lets bytes through at a mean speed: a message may leave once those before it have been paid for.

    Args:
        bytes_per_s: Mean speed, counted with headers.
        clock: Seconds since any moment.
        sleep: Function that waits for some seconds.
    """

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._paid_until = clock()

    def take(self, num_bytes: float) -> None:
        """Wait until `num_bytes` may leave."""
        with self._lock:
            now = self._clock()
            begin = max(now, self._paid_until)
            self._paid_until = begin + num_bytes * HEADERS / self.bytes_per_s
        if begin > now:
            self._sleep(begin - now)


class _Limits:
    """Limits in force in this process; the least of them counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()
        self._bucket: TokenBucket | None = None

    def ask(self, holder: object, bytes_per_s: float | None) -> None:
        """Set the limit of one `holder`, or take it back."""
        with self._lock:
            self._asked.pop(holder, None)
            if bytes_per_s is not None:
                self._asked[holder] = bytes_per_s

    def find(self) -> TokenBucket | None:
        """Return the bucket of the least limit; None without one."""
        if not self._asked:
            return None
        with self._lock:
            least = min(self._asked.values(), default=None)
            if least is None or self._bucket is None or self._bucket.bytes_per_s != least:
                self._bucket = None if least is None else TokenBucket(least)
            return self._bucket


_LIMITS = _Limits()


def limit_bandwidth(holder: object, bytes_per_s: float | None) -> None:
    """Limit what groups of this process send over the network from now on; of several limits the least counts.

    All workers set it before the same operation, since it divides large tensors into messages.

    Args:
        holder: Object that asks for it; the limit ends with it, or with ``limit_bandwidth(holder, None)``.
        bytes_per_s: Mean speed at the interface; None for no limit.
    """
    _LIMITS.ask(holder, bytes_per_s)


def find_limit() -> TokenBucket | None:
    """Return the limit in force; None without one."""
    return _LIMITS.find()
