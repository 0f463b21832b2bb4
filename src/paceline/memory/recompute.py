"""Recomputation of blocks (activation checkpointing): backward computes again the activations that were not kept.

Chen et al. 2016. A block that is recomputed in full keeps its input only; its forward runs a second time in backward,
which makes a step about a third longer if all blocks are recomputed. A block that is recomputed selectively
(Korthikanti 2022) keeps the results of matrix products, convolutions and attention, and computes again the cheap
operations between them. Losses and gradients do not change: random numbers are the same in the second run, and
BatchNorm's running statistics count a batch once. Nothing on the wire changes, nor does any parameter's name.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.sync.batch_statistics import find_statistics

Choice = Literal["full", "selective"]

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
    if choice == "full":
        return nullcontext(), _keeping_statistics(block, nullcontext())
    forward, again = create_selective_checkpoint_contexts(_policy)
    return forward, _keeping_statistics(block, again)


@contextmanager
def _keeping_statistics(block: nn.Module, context: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter `context`, and restore BatchNorm's running statistics afterwards."""
    # Through `data`: autograd may have saved these buffers for backward, and must not see them change.
    buffers = [buffer.data for layer in find_statistics(block).values() for buffer in layer.buffers(recurse=False)]
    before = [buffer.clone() for buffer in buffers]
    try:
        with context:
            yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
