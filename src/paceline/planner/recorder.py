"""A list of what a model does in a step, block by block, made while the step is rehearsed without contents."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from paceline.memory.recompute import KEPT
from paceline.memory.tracker import StorageTracker
from paceline.planner.products import Product, list_products

_aten = torch.ops.aten
ENDS = "<ends>"
"""Name of the place of all that is in no block."""
_COUNTED_SPACES = ("aten", "prims", "profiler")
_COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d", "_c10d_functional_autograd")
_NO_WORK = frozenset(
    {
        _aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided, _aten.detach,
        _aten.t, _aten.alias, _aten._unsafe_view, _aten.lift_fresh, _aten._local_scalar_dense, _aten.resize_,
    }
)  # fmt: skip
"""Operators that move nothing."""
_LOOKUPS = frozenset({_aten.embedding, _aten.index_select, _aten.gather, _aten.index})
"""Operators that read of their first tensor only what they return."""
_LOSSES = frozenset(
    {
        _aten._log_softmax, _aten._log_softmax_backward_data, _aten.nll_loss_forward, _aten.nll_loss_backward,
        _aten.nll_loss2d_forward, _aten.nll_loss2d_backward,
    }
)  # fmt: skip
"""Operators of losses, wherever they are called."""
_SCORES = frozenset({_aten._softmax, _aten._safe_softmax})


@dataclass
class PassRecord:
    """What a place does forward, or backward."""

    products: list[Product] = field(default_factory=list)
    elements: float = 0.0
    """Floating-point elements that other operators read and write."""
    fused_elements: float = 0.0
    """Floating-point elements that are left of them where a compiler makes one kernel of several operators."""
    other_bytes: float = 0.0
    """Bytes of other types that they move."""
    loss_elements: float = 0.0
    kernels: int = 0
    reduced_elements: float = 0.0
    """Elements that ranks all-reduce; what they gather or scatter counts as half."""


@dataclass
class PlaceRecord:
    """What a block, or all that is in none, does and keeps."""

    forward: PassRecord = field(default_factory=PassRecord)
    backward: PassRecord = field(default_factory=PassRecord)
    kept_elements: float = 0.0
    kept_bytes: float = 0.0
    kept_scores: float = 0.0
    kept_products: float = 0.0
    """Elements of the results of products, which selective recomputation keeps."""
    inputs: float = 0.0
    outputs: float = 0.0
    context: float = 0.0
    """Elements of attention's keys and values."""
    is_fused: bool = False
    """Whether attention of one kernel is in it."""


class WorkloadRecorder(TorchDispatchMode):
    """Mode that lists operators by block.

    Backward is told apart by the operation that autograd is at, and its block by that operation's number in forward.

    Args:
        module: Model.
        blocks: Blocks of it, by name.
    """

    def __init__(self, module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, PlaceRecord] = {ENDS: PlaceRecord()}
        self.uncounted: dict[str, None] = {}
        """Names of operators whose flops, bytes or shapes cannot be counted."""
        self.before: set[str] = set()
        """Names of the modules that were called before the first block."""
        self.after: set[int] = set()
        """Storages of parameters that are used after the last block."""
        self.working_bytes = 0.0
        """Bytes that head and loss need at once, beyond those after the last block."""
        self._module, self._blocks = module, blocks
        self._weights = {_storage(one) for one in [*module.parameters(), *module.buffers()]}
        self._kept: set[int] = set()
        self._unwritten: set[int] = set()
        self._has_reached_blocks = False
        self._block, self._is_inside = ENDS, False
        self._first = 0
        self._ranges: list[tuple[int, int, str]] = []
        self._scores: dict[str, set[int]] = {}
        self._tracker: StorageTracker | None = None
        self._held_after = 0.0

    @contextmanager
    def recording(self, tracker: StorageTracker) -> Iterator[None]:
        """Context in which forward and backward of a micro-batch run."""
        self._tracker = tracker
        with ExitStack() as stack:
            for name, part in self._module.named_modules():
                stack.callback(part.register_forward_pre_hook(self._note_call(name)).remove)
            for name, block in self._blocks.items():
                stack.callback(block.register_forward_pre_hook(self._begin(name), with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._end(name)).remove)
            stack.callback(self._module.register_forward_pre_hook(self._enter(True)).remove)
            stack.callback(self._module.register_forward_hook(self._leave).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept))
            stack.enter_context(self)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note it."""
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the operations on what these hold come here one by one
        try:
            result = func(*args, **(kwargs or {}))
        except DynamicOutputShapeException:
            result = self._bound(func, args)
        self._note(func, args, kwargs or {}, result)
        return result

    def _bound(self, func: Any, args: Any) -> Any:
        """Return the largest result that an operator can have whose shape depends on values."""
        self.uncounted[
            f"{func._overloadpacket._qualified_op_name}, whose result counts as the largest there can be"
        ] = None
        given = args[0]
        if func._overloadpacket is _aten.nonzero:
            return given.new_empty((given.numel(), given.dim()), dtype=torch.int64)
        if func._overloadpacket is _aten.masked_select:
            return given.new_empty((given.numel(),))
        if func._overloadpacket is _aten.index and len(args[1]) == 1:
            return given.new_empty((args[1][0].numel(), *given.shape[args[1][0].dim() :]))
        raise DynamicOutputShapeException(func)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        packet, space = func._overloadpacket, func.namespace
        record, is_forward = self._find_place()
        a_pass = record.forward if is_forward else record.backward
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if space in _COLLECTIVES:
            self._note_collective(func.__name__, args, made, a_pass)
            return
        if func.is_view or packet in _NO_WORK or not made:
            return
        a_pass.kernels += 1
        if is_forward and record is self.places[ENDS] and self._ranges:
            self.after |= {_storage(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)} & self._weights
        products = list_products(func, args, kwargs, result, self._weights)
        if products is not None:
            a_pass.products += products
            self._write(tree_leaves((args, kwargs)), a_pass)
            self._unwritten.difference_update(_storage(leaf) for leaf in made)
            if is_forward:
                record.context += sum(product.context for product in products)
                record.is_fused |= any(product.kind == "fused" for product in products)
        else:
            if space not in _COUNTED_SPACES:
                self.uncounted[f"flops of {packet._qualified_op_name}"] = None
            self._note_bytes(packet, args, kwargs, made, a_pass, is_forward)
        if is_forward and func in KEPT:
            record.kept_products += sum(leaf.numel() for leaf in made if leaf.is_floating_point())
        if packet in _SCORES:
            self._scores.setdefault(self._block, set()).add(made[0].numel())

    def _note_bytes(
        self, packet: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor], a_pass: PassRecord, is_forward: bool
    ) -> None:
        given = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        read = list(given.values())
        if packet in _LOOKUPS:
            read = [*read[1:], *made]
        elements = 0.0
        for leaf in (*read, *made):
            number = _count_stored(leaf)
            if leaf.is_floating_point():
                elements += number
            else:
                a_pass.other_bytes += number * leaf.element_size()
        new = [leaf for leaf in made if id(leaf) not in given]
        a_pass.fused_elements += sum(
            _count_stored(leaf) for leaf in read if leaf.is_floating_point() and _storage(leaf) not in self._unwritten
        )
        self._unwritten |= {_storage(leaf) for leaf in new}
        is_loss = packet in _LOSSES or (is_forward and not self._is_inside)
        if is_loss:
            a_pass.loss_elements += elements
        else:
            a_pass.elements += elements

    def _write(self, leaves: list[Any], a_pass: PassRecord) -> None:
        """Count the writing of tensors that a compiler cannot keep inside of a kernel, since others read them."""
        for leaf in leaves:
            if isinstance(leaf, Tensor) and _storage(leaf) in self._unwritten:
                self._unwritten.discard(_storage(leaf))
                a_pass.fused_elements += _count_stored(leaf) * leaf.is_floating_point()

    def _note_collective(self, name: str, args: Any, made: list[Tensor], a_pass: PassRecord) -> None:
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if name.startswith("all_reduce"):
            a_pass.reduced_elements += sum(leaf.numel() for leaf in given)
        elif name.startswith("all_gather"):
            a_pass.reduced_elements += 0.5 * sum(leaf.numel() for leaf in made)
        elif name.startswith("reduce_scatter"):
            a_pass.reduced_elements += 0.5 * sum(leaf.numel() for leaf in given)
        elif not name.startswith("wait"):
            self.uncounted[f"bytes of {name}"] = None

    def _find_place(self) -> tuple[PlaceRecord, bool]:
        """Return the record of what runs now, and whether it is forward."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self.places[self._block], True
        number = node._sequence_nr()
        name = next((name for begin, end, name in self._ranges if begin <= number < end), ENDS)
        if name != ENDS and not self._has_reached_blocks and self._tracker is not None:
            self._has_reached_blocks = True
            self.working_bytes = self._tracker.peak_bytes - self._held_after
        return self.places[name], False

    def _note_call(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if not self._ranges and self._block == ENDS:
                self.before.add(name)

        return hook

    def _enter(self, is_inside: bool) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._is_inside = is_inside

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._is_inside = False

    def _begin(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            record = self.places.setdefault(name, PlaceRecord())
            record.inputs += _count_elements((args, kwargs))
            self._block = name
            self._first = torch.autograd._get_sequence_nr()

        return hook

    def _end(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._ranges.append((self._first, torch.autograd._get_sequence_nr(), name))
            self.places[name].outputs += _count_elements(output)
            self._write(tree_leaves(output), self.places[name].forward)
            self._block = ENDS
            if self._tracker is not None:
                self._tracker.reset_peak()
                self._held_after = float(self._tracker.peak_bytes)

        return hook

    def _keep(self, tensor: Tensor) -> Tensor:
        """Note what autograd keeps for backward, once for each storage."""
        held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if held.layout != torch.strided:
            return tensor
        storage = held.untyped_storage()
        key = storage._cdata
        if key in self._weights or key in self._kept:
            return tensor
        self._kept.add(key)
        record = self.places[self._block]
        self._write([held], record.forward)
        if not held.is_floating_point():
            record.kept_bytes += storage.nbytes()
            return tensor
        number = storage.nbytes() // held.element_size()
        record.kept_elements += number
        if number in self._scores.get(self._block, ()):
            record.kept_scores += number
        return tensor


class WithoutAttentionDropout(TorchFunctionMode):
    """Mode in which attention drops no weights: kernels of accelerators drop without further memory, CPUs' do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)


def _count_stored(tensor: Tensor) -> int:
    """Return the elements of a tensor that are in memory: fewer than it has where it is expanded."""
    if tensor.layout != torch.strided:
        return 0
    return min(tensor.numel(), tensor.untyped_storage().nbytes() // max(1, tensor.element_size()))


def _count_elements(given: Any) -> float:
    leaves = {id(leaf): leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    return float(sum(leaf.numel() for leaf in leaves.values()))
