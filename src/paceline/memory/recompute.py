"""Recomputation of blocks (activation checkpointing): backward computes again the activations that were not kept.

Chen et al. 2016. A block that is recomputed in full keeps its input only; its forward runs a second time in backward,
which makes a step about a third longer if all blocks are recomputed. A block that is recomputed selectively
(Korthikanti 2022) keeps the results of matrix products, convolutions and attention, and computes again the cheap
operations between them. Losses and gradients do not change: the second run draws the same random numbers, also from
Python's and NumPy's generators and from those that modules have, finds buffers (BatchNorm's statistics, spectral norm's
vectors, averages of one's own), numbers and tensors of modules as the first did, and leaves all of them as they are.
For that they are copied in each forward; copies of what changed wait for backward (on a GPU copies of all buffers: to
compare them, the host would wait). Nothing on the wire changes, nor does any parameter's name.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    _DEFAULT_DETERMINISM_MODE,
    _RECOMPUTE,
    CheckpointPolicy,
    _checkpoint_without_reentrant_generator,
    create_selective_checkpoint_contexts,
)

from paceline.memory.block_state import BlockState

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

    Hooks do it, so that the model's structure and names do not change. Call it before a model is sharded or compiled.

    Args:
        module: The model.
        choices: Recomputation by the block's name; blocks that are left out keep all activations.
    """
    for name, choice in choices.items():
        _RecomputedBlock(module.get_submodule(name), choice)


class _RecomputedBlock:
    """Hooks that make backward run a block again, as torch's composable checkpoint does.

    Unlike its contexts these can be entered again, as backward through a retained graph does.

    Args:
        block: The block.
        choice: Recomputation of it.
    """

    def __init__(self, block: nn.Module, choice: Choice) -> None:
        self._choice = choice
        self._is_replaying = False
        self._forward: Iterator[None] | None = None
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        block.register_forward_hook(self._end, prepend=True, always_call=True)

    def _begin(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_replaying:
            make_contexts = partial(self._make_contexts, block)
            self._forward = _checkpoint_without_reentrant_generator(
                block, True, make_contexts, _DEFAULT_DETERMINISM_MODE, False, True, *args, **kwargs
            )
            next(self._forward)

    def _end(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if not self._is_replaying and self._forward is not None:
            next(self._forward, None)
            self._forward = None

    def _make_contexts(self, block: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a block: for forward, and for the computation in backward."""
        first, again = _keep_products() if self._choice == "selective" else (nullcontext(), nullcontext())
        state = BlockState(block)
        # Torch takes modes of functions off while it runs backward.
        modes = [mode for mode in _get_current_function_mode_stack() if getattr(mode, "stays_in_backward", False)]
        return state.recorded(first), _Reentered(lambda: self._replay(state, again, modes))

    @contextmanager
    def _replay(
        self, state: BlockState, context: AbstractContextManager[Any], modes: Sequence[TorchFunctionMode]
    ) -> Iterator[None]:
        self._is_replaying = True
        try:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                stack.enter_context(state.replayed(context))
                yield
        finally:
            self._is_replaying = False


class _Reentered(AbstractContextManager[None]):
    """A context that can be entered again after its end.

    Args:
        make: Function that returns the context of one time.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


def _keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of selective recomputation: for forward, and for the computation in backward.

    A product that is changed in place later is not kept: it is computed again, and changed again.
    """
    numbers: Counter[Any] = Counter()
    kept: dict[int, list[tuple[Any, int]]] = {}
    results: dict[Any, dict[int, Any]] = {}

    def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in KEPT:
            for key in _list_storages(context.op_output):
                kept.setdefault(key, []).append((operation, numbers[operation]))
            numbers[operation] += 1
            return CheckpointPolicy.MUST_SAVE
        for key in _list_storages(_list_changed(operation, args, kwargs)):
            # By storages: torch's GRU changes parts of a product whose versions are apart from the product's.
            for product, number in kept.pop(key, ()):
                results[product][number] = _RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(choose)
    results = first.storage
    return first, again


def _list_changed(operation: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation changes in place."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.is_write
    ]


def _list_storages(values: Any) -> Iterator[int]:
    """Yield the identities of the storages of tensors, of DTensors those of this rank's part."""
    for leaf in tree_leaves(values):
        tensor = getattr(leaf, "_local_tensor", leaf)
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
            yield tensor.untyped_storage()._cdata
