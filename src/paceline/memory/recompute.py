"""Recomputation of blocks (activation checkpointing): backward computes again the activations that were not kept.

Chen et al. 2016. A block that is recomputed in full keeps its input only; its forward runs a second time in backward,
which makes a step about a third longer if all blocks are recomputed. A block that is recomputed selectively
(Korthikanti 2022) keeps the results of matrix products, convolutions and attention, and computes again the cheap
operations between them. Losses and gradients do not change: the second run draws the same random numbers, also from
Python's and NumPy's generators, finds the buffers (BatchNorm's statistics, spectral norm's vectors, averages of one's
own) as the first did, and leaves all of them as they are. For that a block's buffers are copied in each forward; copies
of those that changed wait for backward (on a GPU all copies: to compare them, the host would wait). Nothing on the wire
changes, nor does any parameter's name.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Choice = Literal["full", "selective"]
_Slot = tuple[nn.Module, str]
"""Module that has a buffer, and the buffer's name there."""

_aten = torch.ops.aten
KEPT = frozenset(
    operation
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if (packet := getattr(_aten, name, None)) is not None
    for operation in [packet.default]
)
"""Operations whose results selective recomputation keeps: those that take most of the time."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_recomputable(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in the model's order.

    A block is a child of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` that has children of its own and is
    none of these containers; or an `nn.Sequential` in one of them, none of whose children has any. So a transformer's
    layers are blocks and a ResNet's residual blocks, but not each convolution of its stem: to compute a single
    operation again saves next to nothing. No block is inside another.
    """
    return dict(_find(module, ""))


def _find(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    is_container = isinstance(module, _CONTAINERS)
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if is_container and _is_block(child):
            yield name, child
        else:
            yield from _find(child, f"{name}.")


def _is_block(module: nn.Module) -> bool:
    children = list(module.children())
    if isinstance(module, nn.Sequential):
        return len(children) > 1 and not any(list(child.children()) for child in children)
    return len(children) > 0 and not isinstance(module, _CONTAINERS)


def recompute(module: nn.Module, choices: Mapping[str, Choice]) -> None:
    """Make backward recompute blocks of `module`, in place.

    Hooks do it (torch's composable checkpoint), so that the model's structure and names do not change. Call it
    before a model is sharded or compiled.

    Args:
        module: The model.
        choices: Recomputation by the block's name; blocks that are left out keep all activations.
    """
    for name, choice in choices.items():
        block = module.get_submodule(name)
        checkpoint(block, context_fn=partial(_make_contexts, block, choice))


def _make_contexts(block: nn.Module, choice: Choice) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a block: for forward, and for the computation in backward."""
    first, again = nullcontext(), nullcontext()
    if choice == "selective":
        first, again = create_selective_checkpoint_contexts(_policy)
    before = _Before(block)
    return before.recorded(first), before.replayed(again)


class _Before:
    """The buffers that one forward of a block changed, and generators that it drew from, as it found them.

    Torch keeps its own generators. The second run gets copies of the buffers, so that it computes what the first did
    (spectral norm's vectors move on with each run), and leaves the buffers themselves as they are. Copies, rather than
    the buffers with other contents: what autograd saves in the second run must not change when that ends.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._values: dict[_Slot, Tensor | None] = {}
        self._generators: list[tuple[Callable[[Any], None], Any]] = []

    @contextmanager
    def recorded(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Enter `context`, and keep a copy of each buffer and generator that changes until its end."""
        of_python, of_numpy = _generators()
        found = {slot: (buffer, _version(buffer)) for slot, buffer in self._list()}
        values = _copy(dict(self._list()))
        with context:
            yield
        now = dict(self._list())
        self._values = {
            slot: values[slot]
            for slot, (buffer, version) in found.items()
            if now.get(slot) is not buffer or _version(buffer) != version or _may_differ(buffer, values[slot])
        }
        drawn = _generators()
        if drawn[0] != of_python:
            self._generators.append((random.setstate, of_python))
        if _mark(drawn[1]) != _mark(of_numpy):
            self._generators.append((np.random.set_state, of_numpy))

    @contextmanager
    def replayed(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Enter `context` with those copies in the places of the buffers, and put the buffers back."""
        now = dict(self._list())
        for (module, name), value in self._values.items():
            module._buffers[name] = value
        drawn = _generators() if self._generators else None
        for set_state, state in self._generators:
            set_state(state)
        try:
            with context:
                yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer
            if drawn is not None:
                random.setstate(drawn[0])
                np.random.set_state(drawn[1])

    def _list(self) -> Iterator[tuple[_Slot, Tensor | None]]:
        for module in self._block.modules():
            for name, buffer in module._buffers.items():
                yield (module, name), buffer


def _generators() -> tuple[Any, dict[str, Any]]:
    """Return the states of Python's and NumPy's global generators."""
    return random.getstate(), np.random.get_state(legacy=False)


def _mark(state: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a draw changes in a state of NumPy's generator."""
    return state["state"]["pos"], state["state"]["key"].tobytes(), state["has_gauss"]


def _copy(buffers: Mapping[_Slot, Tensor | None]) -> dict[_Slot, Tensor | None]:
    """Return copies; one tensor in two places is copied once."""
    copies = {id(buffer): buffer.detach().clone() for buffer in buffers.values() if buffer is not None}
    return {slot: None if buffer is None else copies[id(buffer)] for slot, buffer in buffers.items()}


def _version(buffer: Tensor | None) -> int:
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _may_differ(buffer: Tensor | None, before: Tensor | None) -> bool:
    """Return whether a buffer whose version stayed may have other bits: batch norm and ``.data`` count no change."""
    if buffer is None or before is None:
        return False
    if buffer.device.type != "cpu" or buffer.layout != torch.strided or type(buffer) is not Tensor:
        return not buffer.is_meta  # to compare on a GPU, the host would wait
    one, other = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (buffer, before))
    return not torch.equal(one, other)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
