"""A device that is none: its tensors lie in host memory, but may not be mixed with those of the CPU.

What would make the host wait for a GPU is recorded: values read by the host, copies between devices that are not
``non_blocking``, operations whose output's shape depends on values, and waits for events.
"""

import functools
import threading
import traceback
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from paceline.comm.streams import BACKENDS

DEVICE = torch.device("lazy", 0)  # autograd needs no thread for this kind, and nothing else here is of it
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default, torch.ops.aten._to_copy.default}
_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten._unique2.default,
}
_recorders = []


@contextmanager
def recorded_syncs():
    """Yield a list of the times that the host waits for the device inside, each as its thread's name and its line."""
    syncs = []
    _recorders.append(syncs)
    try:
        yield syncs
    finally:
        _recorders[:] = [one for one in _recorders if one is not syncs]


def note_sync(what):
    """Record that the host waits for the device here."""
    if not _recorders:
        return
    frames = [frame for frame in traceback.extract_stack() if "/paceline/" in frame.filename]
    where = f"{frames[-1].filename.rpartition('/paceline/')[2]}:{frames[-1].lineno}" if frames else "outside"
    for syncs in _recorders:
        syncs.append((threading.current_thread().name, f"{what} at {where}"))


class DistantTensor(Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )

    def __init__(self, inner):
        self.inner = inner

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class Streams:
    """Streams and events of the device, as `paceline.comm.streams` uses them.

    All work runs at once, but each tensor knows the work that wrote it last, and each stream what it has waited for:
    using a tensor that another stream wrote, without waiting for that, is an error.
    """

    def __init__(self):
        self._thread = threading.local()
        self._written = {}
        self.is_busy = False
        """Whether all events are still to come, as far as they say; they tell one second for each kernel."""
        self.num_waits = 0
        """Times that the host waited for an event while later work was queued on the event's computing stream."""

    class Stream:
        def __init__(self, device=None):
            self.seen = {self: 0}

        def wait_event(self, event):
            for stream, number in event.seen.items():
                self.seen[stream] = max(number, self.seen.get(stream, 0))

    def Event(self, enable_timing=False):  # noqa: N802
        return _Event(self)

    def current_stream(self, device=None):
        if not hasattr(self._thread, "stream"):
            self._thread.stream = self._thread.computing = self.Stream()
        return self._thread.stream

    @contextmanager
    def stream(self, stream):
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def has_later_work(self, event):
        self.current_stream()
        computing = self._thread.computing
        return computing.seen[computing] > event.seen.get(computing, 0)

    def run(self, func, used, written):
        """Note a kernel on the present stream that uses some tensors and writes others."""
        stream = self.current_stream()
        for tensor in used:
            writer, number = self._written.get(_storage(tensor), (stream, 0))
            if stream.seen.get(writer, 0) < number:
                raise AssertionError(f"{func} uses a tensor of another stream, which it has not waited for")
        stream.seen[stream] += 1
        for tensor in written:
            self._written[_storage(tensor)] = stream, stream.seen[stream]


def _storage(tensor):
    return tensor.inner.untyped_storage()._cdata


class _Event:
    def __init__(self, streams):
        self._streams = streams
        self.seen = {}

    def record(self, stream=None):
        self.seen = dict((stream or self._streams.current_stream()).seen)

    def query(self):
        return not self._streams.is_busy

    def elapsed_time(self, other):
        return 1e3 * (sum(other.seen.values()) - sum(self.seen.values()))

    def synchronize(self):
        if self._streams.has_later_work(self):
            self._streams.num_waits += 1
        else:
            note_sync("wait for an event")


class OnDevice(TorchDispatchMode):
    """Inside, in one thread, tensors can be made on the device."""

    def __enter__(self):
        torch._C._set_only_lift_cpu_tensors(True)  # or `torch.tensor` with a device would pass modes by
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    tensors = [*_tensors_of(args), *_tensors_of(kwargs.values())]
    is_distant = any(isinstance(tensor, DistantTensor) for tensor in tensors)
    if func in _COPIES:
        is_distant = isinstance(tensors[0], DistantTensor)
    elif is_distant and any(tensor.dim() for tensor in tensors if not isinstance(tensor, DistantTensor)):
        raise RuntimeError(f"{func} must have tensors of one device, but got some on the CPU and some on {DEVICE}")
    if kwargs.get("device") is not None:
        is_distant = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if (func in _READS and is_distant) or (func in _COPIES and _crosses(func, tensors, args, kwargs, is_distant)):
        note_sync(func)
    out = func(*_map(_bring_near, args), **{name: _map(_bring_near, value) for name, value in kwargs.items()})
    streams = BACKENDS.get(DEVICE.type)
    if is_distant:
        out = _map(lambda tensor: tensor if isinstance(tensor, DistantTensor) else DistantTensor(tensor), out)
    if streams is not None:
        distant = [tensor for tensor in tensors if isinstance(tensor, DistantTensor)]
        given = {value.name: args[number] for number, value in enumerate(func._schema.arguments[: len(args)])} | kwargs
        written = [*_tensors_of(given[value.name] for value in func._schema.arguments if _is_written(value, given))]
        written += [] if _has_aliases(func) else _tensors_of([out])
        streams.run(func, distant, [tensor for tensor in written if isinstance(tensor, DistantTensor)])
    if not is_distant:
        return out
    return return_and_correct_aliasing(func, args, kwargs, out) if _has_aliases(func) else out


def _crosses(func, tensors, args, kwargs, to_distant):
    """Whether a copy goes between devices and the host waits for it."""
    if func is torch.ops.aten._to_copy.default:
        sources, is_queued = tensors, kwargs.get("non_blocking", False)
    else:
        sources = tensors[1:] if func is torch.ops.aten.copy_.default else tensors[len(args[0]) :]
        is_queued = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    return not is_queued and any(isinstance(source, DistantTensor) != to_distant for source in sources)


def _is_written(argument, given):
    return argument.name in given and argument.alias_info is not None and argument.alias_info.is_write


@functools.cache
def _has_aliases(func):
    return any(value.alias_info is not None for value in (*func._schema.arguments, *func._schema.returns))


def _bring_near(tensor):
    return tensor.inner if isinstance(tensor, DistantTensor) else tensor


def _tensors_of(values):
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_of(value)


def _map(change, value):
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_map(change, part) for part in value) if type(value) in (list, tuple) else value
