"""Counts the bytes of tensors that are alive, and remembers what they were for when they were most."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Category = Literal["parameters", "gradients", "optimizer", "activations", "communication", "temporary"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
_CUDA_ROUNDING = 512
"""What torch's allocator of GPU memory rounds sizes up to."""


class StorageTracker(TorchDispatchMode):
    """Inside it, every tensor that an operation makes is counted until it is let go of.

    It counts bytes of storages, so views cost nothing, on real tensors and on those of torch's `FakeTensorMode` alike.
    It sees what `torch.distributed._tools.mem_tracker.MemTracker` sees, and tests hold the one to the other; that one
    goes through all modules at every operation, which takes minutes for a large model, and knows one forward a step.
    What kernels allocate for themselves (workspaces of cuBLAS and cuDNN, buffers of a backend) no tracker of tensors
    sees.

    Args:
        device: Kind of device whose tensors count.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._known: dict[int, tuple[Category, int]] = {}
        self._now: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self._now_bytes = self.peak_bytes = 0
        self.peak_activation_bytes = 0
        """The most bytes of activations alive at once, which need not be at the peak of all."""
        self._peak = dict(self._now)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would first import all of it: a second

    @property
    def now(self) -> Mapping[Category, int]:
        """What is alive, by what it is for."""
        return self._now

    @property
    def peak(self) -> Mapping[Category, int]:
        """What was alive at the moment when it was most, by what it was for; in sum `peak_bytes`."""
        return dict(self._peak)

    def label(self, category: Category, tensors: Iterable[Tensor], *, is_part: bool = False) -> None:
        """Say what tensors are for; those not known yet count from now on.

        Args:
            category: What for.
            tensors: Each with its whole storage.
            is_part: Whether a tensor's own bytes count instead: where it is a small view of what is there anyway.
        """
        for tensor in tensors:
            self._note(tensor, category, is_certain=True, num_bytes=tensor.nbytes if is_part else None)

    def reset_peak(self) -> None:
        """Forget the most so far."""
        self.peak_bytes, self._peak = self._now_bytes, dict(self._now)
        self.peak_activation_bytes = self._now["activations"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count what it made."""
        result = func(*args, **(kwargs or {}))
        # Forward records what it does, also where backward runs it again; backward and optimizers do not.
        category: Category = "activations" if torch.is_grad_enabled() else "temporary"
        made = [leaf for leaf in tree_leaves(result) if self._is_new(leaf)]
        if made:
            # A view of what was there before the tracker (a file, memory shared with others) is nothing new.
            given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
            for leaf in made:
                if _key(leaf) not in given:
                    self._note(leaf, category, is_certain=False)
        self.peak_activation_bytes = max(self.peak_activation_bytes, self._now["activations"])
        if self._now_bytes > self.peak_bytes:
            self.peak_bytes, self._peak = self._now_bytes, dict(self._now)
        return result

    def _is_new(self, leaf: Any) -> bool:
        return _has_storage(leaf) and _key(leaf) not in self._known

    def _note(self, tensor: Tensor, category: Category, *, is_certain: bool, num_bytes: int | None = None) -> None:
        if tensor.device.type != self._device or not _has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is None:
            num_bytes = storage.nbytes() if num_bytes is None else num_bytes
            if self._device == "cuda":
                num_bytes = -(-num_bytes // _CUDA_ROUNDING) * _CUDA_ROUNDING
            weakref.finalize(storage, self._forget, key).atexit = False
        elif is_certain and known[0] != category:
            self._now[known[0]] -= known[1]
            num_bytes = known[1]
            self._now_bytes -= num_bytes
        else:
            return
        self._known[key] = category, num_bytes
        self._now[category] += num_bytes
        self._now_bytes += num_bytes

    def _forget(self, key: int) -> None:
        category, num_bytes = self._known.pop(key)
        self._now[category] -= num_bytes
        self._now_bytes -= num_bytes


@contextmanager
def counting(
    module: nn.Module, optimizer: torch.optim.Optimizer, device: str, tracker: StorageTracker | None = None
) -> Iterator[StorageTracker]:
    """Inside, count what training `module` makes; gradients and optimizer state are told apart as they come.

    Hooks on parameters that make views of their gradients must have been registered before.

    Args:
        module: What is trained.
        optimizer: Over its parameters.
        device: Kind of device whose tensors count.
        tracker: Counts on from where it was; a new one without it.
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

    def take_state(stepped: torch.optim.Optimizer, *_: object) -> None:
        tracker.label("optimizer", optimizer_tensors(stepped))

    handles = [
        parameter.register_post_accumulate_grad_hook(take_gradient)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    step_handle = optimizer.register_step_post_hook(take_state)
    try:
        with tracker:
            yield tracker
    finally:
        for handle in [*handles, step_handle]:
            handle.remove()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
