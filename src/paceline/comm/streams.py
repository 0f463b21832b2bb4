"""Queues of a GPU's work beside the computing one, and waiting for a part of it; a CPU has none of these."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BACKENDS: dict[str, Any] = {"cuda": torch.cuda}
"""Modules with `Stream`, `Event`, `stream` and `current_stream`, by device type."""


class SideStream:
    """A queue of a device's work beside the computing one, for one thread; on other devices all of it does nothing.

    Memory is safe without `record_stream` if everything that runs here waits for a `mark` of the computing stream, and
    the computing stream waits for its end before it frees or reuses what it took.

    Args:
        device: Device of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend = BACKENDS.get(device.type)
        self._stream: Any = self._backend.Stream(device=device) if self._backend is not None else None

    def mark(self) -> Any:
        """Return an event at the present end of the calling thread's stream; None if the device has none."""
        return record(self._device)

    @contextmanager
    def running(self, after: Any) -> Iterator[None]:
        """Queue what is launched inside on this stream, after the event `after`."""
        if self._backend is None:
            yield
            return
        with self._backend.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield


def record(device: torch.device, *, is_timed: bool = False) -> Any:
    """Return an event at the present end of the calling thread's stream; None if the device has no streams."""
    backend = BACKENDS.get(device.type)
    if backend is None:
        return None
    event = backend.Event(enable_timing=is_timed)
    event.record(backend.current_stream(device))
    return event


def wait_in_queue(device: torch.device, event: Any) -> None:
    """Let what is queued from now on, on the calling thread's stream, begin after `event`; the host goes on."""
    if event is not None:
        BACKENDS[device.type].current_stream(device).wait_event(event)


def keep_for_stream(tensor: Tensor) -> None:
    """Let the allocator reuse a tensor's memory only after what is queued, when it is freed, on the caller's stream."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class HostCopy:
    """A copy in host memory of a small tensor on a GPU, under way.

    Who reads it waits for the tensor and for nothing that is queued after it, such as a backward pass.

    Args:
        tensor: Tensor to copy, as it is at the present end of the calling thread's stream. It is kept until then.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._copy = copy_to_host(tensor)
        self._event = record(tensor.device)

    def tolist(self) -> Any:
        """Return the values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        self._tensor = self._event = None
        return self._copy.tolist()


def send_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor of host memory on `device`; the host goes on while the copy is queued."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=device.type != "cpu")


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a tensor in pinned host memory, whose values come once the copy, queued here, has run."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor, non_blocking=True)
