"""A count of the bytes of living tensors, and their purposes at the peak."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

Category = Literal["parameters", "gradients", "optimizer", "activations", "communication", "temporary"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
_CUDA_ROUNDING = 512
"""Unit that torch's allocator of GPU memory rounds sizes up to."""


class StorageTracker(TorchDispatchMode):
    """Context in which every tensor that an operation makes is counted until it is freed.

    It counts bytes of storages, so views cost nothing, for real tensors and for those of torch's `FakeTensorMode`; of
    DTensors it counts this rank's part. Storages that are given another size count with it, such as FSDP's of gathered
    parameters, which are made once, then emptied and filled again. It sees what
    `torch.distributed._tools.mem_tracker.MemTracker` sees, and tests compare the two; the latter goes through all
    modules at every operation, which takes minutes for a large model, and supports one forward a step. No tracker of
    tensors sees the memory that kernels allocate for themselves (workspaces of cuBLAS and cuDNN, buffers of a backend).

    Args:
        device: Type of the device whose tensors count.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._known: dict[int, tuple[Category, int]] = {}
        self._references: dict[int, weakref.ref[UntypedStorage]] = {}
        self._now: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self._now_bytes = self.peak_bytes = 0
        self.peak_activation_bytes = 0
        """Peak of activations, which need not be at the peak of all bytes."""
        self._peak = dict(self._now)
        self._thread = 0

    def __enter__(self) -> Self:
        """Begin to count what operations of this thread make."""
        self._thread = threading.get_ident()
        _resizes.add(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _resizes.remove(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip Dynamo, torch would import it first, which takes a second

    @property
    def now(self) -> Mapping[Category, int]:
        """Bytes of living tensors, by purpose."""
        return self._now

    @property
    def peak(self) -> Mapping[Category, int]:
        """Bytes of living tensors at the peak, by purpose; their sum is `peak_bytes`."""
        return dict(self._peak)

    def label(self, category: Category, tensors: Iterable[Tensor], *, is_part: bool = False) -> None:
        """Set the purpose of tensors; tensors not known yet count from now on.

        Args:
            category: Purpose of the tensors.
            tensors: Tensors, each with its whole storage.
            is_part: Whether only a tensor's own bytes count: for a small view of a storage that exists anyway.
        """
        for tensor in tensors:
            self._note(tensor, category, is_certain=True, num_bytes=tensor.nbytes if is_part else None)

    def reset_peak(self) -> None:
        """Restart the peak at the present bytes."""
        self.peak_bytes, self._peak = self._now_bytes, dict(self._now)
        self.peak_activation_bytes = self._now["activations"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count the tensors that it made."""
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the operations on what these hold come here one by one
        result = func(*args, **(kwargs or {}))
        # Forward records a graph, also when backward runs it again; backward and optimizers do not.
        category: Category = "activations" if torch.is_grad_enabled() else "temporary"
        made = [leaf for leaf in tree_leaves(result) if self._is_new(leaf)]
        if made:
            # A view of a storage that existed before the tracker (a file, memory shared with others) does not count.
            given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
            for leaf in made:
                if _key(leaf) not in given:
                    self._note(leaf, category, is_certain=False)
        self._compare()
        return result

    def resize(self, storage: UntypedStorage, num_bytes: int) -> None:
        """Note that a storage has another size now; one that nobody labelled holds gathered parameters.

        Tensors of a rehearsal, on whatever device, have storages on the meta device.
        """
        if storage.device.type not in (self._device, "meta") or threading.get_ident() != self._thread:
            return
        key = storage._cdata
        if key not in self._known:
            self._known[key] = "parameters", 0
            self._watch(storage, key)
        category, before = self._known[key]
        self._known[key] = category, self._round(num_bytes)
        self._now[category] += self._known[key][1] - before
        self._now_bytes += self._known[key][1] - before
        self._compare()

    def _compare(self) -> None:
        self.peak_activation_bytes = max(self.peak_activation_bytes, self._now["activations"])
        if self._now_bytes > self.peak_bytes:
            self.peak_bytes, self._peak = self._now_bytes, dict(self._now)

    def _is_new(self, leaf: Any) -> bool:
        return _has_storage(leaf) and _key(leaf) not in self._known

    def _round(self, num_bytes: int) -> int:
        return -(-num_bytes // _CUDA_ROUNDING) * _CUDA_ROUNDING if self._device == "cuda" else num_bytes

    def _note(self, tensor: Tensor, category: Category, *, is_certain: bool, num_bytes: int | None = None) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type != self._device or not _has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is None:
            num_bytes = self._round(storage.nbytes() if num_bytes is None else num_bytes)
            self._watch(storage, key)
        elif is_certain and known[0] != category:
            self._now[known[0]] -= known[1]
            num_bytes = known[1]
            self._now_bytes -= num_bytes
        else:
            return
        self._known[key] = category, num_bytes
        self._now[category] += num_bytes
        self._now_bytes += num_bytes

    def _watch(self, storage: UntypedStorage, key: int) -> None:
        """Forget a storage when it goes. No storage may hold the tracker: those of models outlive it."""
        this = weakref.ref(self)

        def forget(_: object) -> None:
            if (tracker := this()) is not None:
                tracker._forget(key)

        self._references[key] = weakref.ref(storage, forget)

    def _forget(self, key: int) -> None:
        del self._references[key]
        category, num_bytes = self._known.pop(key)
        self._now[category] -= num_bytes
        self._now_bytes -= num_bytes


@contextmanager
def counting(
    module: nn.Module, optimizer: torch.optim.Optimizer, device: str, tracker: StorageTracker | None = None
) -> Iterator[StorageTracker]:
    """Count the tensors of training `module`; gradients and optimizer state are labelled as they are made.

    Register hooks that make gradients views of buffers before this.

    Args:
        module: Module to train.
        optimizer: Optimizer of its parameters.
        device: Type of the device whose tensors count.
        tracker: Tracker to continue; None for a new one.
    """
    is_new = tracker is None
    tracker = tracker or StorageTracker(device)
    tracker.label("parameters", [*module.parameters(), *module.buffers()])
    tracker.label("optimizer", optimizer_tensors(optimizer))
    tracker.label("gradients", [p.grad for p in module.parameters() if p.grad is not None])
    if is_new:
        tracker.reset_peak()

    def take_gradient(parameter: Tensor) -> None:
        assert parameter.grad is not None
        tracker.label("gradients", [parameter.grad])

    handles = [
        parameter.register_post_accumulate_grad_hook(take_gradient)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    step_handle = optimizer.register_step_post_hook(StateReader(tracker))
    try:
        with tracker:
            yield tracker
    finally:
        for handle in [*handles, step_handle]:
            handle.remove()


class _Resizes:
    """Tells trackers of storages that are given another size, which no operation of torch's dispatcher does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trackers: list[StorageTracker] = []

    def add(self, tracker: StorageTracker) -> None:
        """Begin to tell a tracker."""
        with self._lock:
            if not self._trackers:
                UntypedStorage.resize_ = self._make(UntypedStorage.resize_)  # type: ignore[method-assign]
            self._trackers.append(tracker)

    def remove(self, tracker: StorageTracker) -> None:
        """End it."""
        with self._lock:
            self._trackers.remove(tracker)
            if not self._trackers:
                del UntypedStorage.resize_  # what it inherits is there again

    def _make(self, original: Callable[[UntypedStorage, int], Any]) -> Any:
        def resize(storage: UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            for tracker in list(self._trackers):
                tracker.resize(storage, size)
            return result

        return resize


_resizes = _Resizes()


class StateReader:
    """Hook of an optimizer's steps that labels its state, and changes nothing.

    Args:
        tracker: Tracker of the labels.
    """

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Label the state."""
        self._tracker.label("optimizer", optimizer_tensors(optimizer))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
