"""Activations that wait in CPU memory from forward to backward."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.weak import WeakIdKeyDictionary

from paceline.comm.streams import SideStream, keep_for_stream, wait_in_queue

SMALLEST_BYTES = 1 << 20
"""Size below which tensors stay: sending one costs more time than its memory is worth."""


@dataclass(eq=False)
class _Sent:
    """A tensor that waits in another device's memory."""

    device: torch.device
    """Original device."""
    copy: Tensor
    stream: SideStream
    """Stream of the copies."""
    before: "weakref.ref[_Sent] | None"
    """Tensor that was sent before: backward needs it next."""
    back: Tensor | None = None
    """The tensor on its original device again, under way."""
    arrival: Any = None

    def fetch(self) -> None:
        """Begin to bring the tensor back."""
        if self.back is None:
            with self.stream.running(None):
                self.back = self.copy.to(self.device, non_blocking=self.device.type != "cpu")
                self.arrival = self.stream.mark()


class ActivationOffload:
    """Sends the tensors that forward saves for backward to another device's memory, and brings them back for backward.

    Parameters and tensors below `smallest_bytes` stay, and a tensor saved twice is sent once. Together with
    recomputation, the inputs of recomputed blocks are sent. Tensors saved by the loss itself stay, since they are
    needed first. Each tensor crosses the bus twice a step, on a GPU on a stream beside the computing one; backward asks
    for a tensor while it uses the one before, so that one more is on the device.

    Args:
        module: Module that runs forward; its hooks begin and end the offloading.
        device: Device where activations wait.
        smallest_bytes: Size from which tensors are sent.
    """

    def __init__(self, module: nn.Module, device: str = "cpu", smallest_bytes: int = SMALLEST_BYTES) -> None:
        self._device = torch.device(device)
        self._smallest_bytes = smallest_bytes
        self._resident: set[int] = set()
        self._open: list[Any] = []
        self._sent = WeakIdKeyDictionary()
        self._streams: dict[torch.device, SideStream] = {}
        self._newest: weakref.ref[_Sent] | None = None
        self.num_sent = 0
        """Number of tensors sent so far."""
        module.register_forward_pre_hook(self._begin, prepend=True)
        module.register_forward_hook(self._end, always_call=True)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        # On every call: a parameter may get another storage between steps.
        self._resident = {_storage(parameter)._cdata for parameter in module.parameters()}
        hooks = torch.autograd.graph.saved_tensors_hooks(self._send, _bring_back)
        hooks.__enter__()
        self._open.append(hooks)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def _send(self, tensor: Tensor) -> _Sent | Tensor:
        storage = _storage(tensor)
        if tensor.nbytes < self._smallest_bytes or storage._cdata in self._resident:
            return tensor
        views = self._sent.setdefault(storage, weakref.WeakValueDictionary())
        view = (tensor._version, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        sent: _Sent | None = views.get(view)
        if sent is None:
            is_pinned = tensor.device.type == "cuda" and self._device.type == "cpu"
            copy = torch.empty_like(tensor, device=self._device, pin_memory=is_pinned)
            if (stream := self._streams.get(tensor.device)) is None:
                stream = self._streams[tensor.device] = SideStream(tensor.device)
            with stream.running(stream.mark()):
                copy.copy_(tensor, non_blocking=tensor.device.type != "cpu")
                keep_for_stream(tensor)
            sent = views[view] = _Sent(tensor.device, copy, stream, self._newest)
            self._newest = weakref.ref(sent)
            self.num_sent += 1
        return sent


def _bring_back(sent: _Sent | Tensor) -> Tensor:
    if isinstance(sent, Tensor):
        return sent
    sent.fetch()
    back, sent.back = sent.back, None
    assert back is not None
    wait_in_queue(sent.device, sent.arrival)
    keep_for_stream(back)
    if (following := sent.before() if sent.before is not None else None) is not None:
        following.fetch()
    return back


def _storage(tensor: Tensor) -> UntypedStorage:
    return tensor.untyped_storage()
