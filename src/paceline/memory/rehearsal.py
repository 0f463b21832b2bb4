"""A step of training, rehearsed on tensors that have shapes and devices but no contents."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from paceline.memory.recompute import KEPT, Choice
from paceline.memory.tracker import Category, StorageTracker, counting

_ELEMENT_FLOPS = 16
"""Cost of a written element, as the arithmetic that a device could do in that time, for operations that move bytes."""


@dataclass(frozen=True)
class StepDescription:
    """Description of one step of a worker, to be rehearsed.

    Args:
        build: Function that makes the module, on the default device, with the given blocks recomputed in backward; and
            its optimizer.
        loss: Function that returns the loss of one micro-batch.
        device: Device of the training.
        num_micro_batches: Number of micro-batches in a step.
        is_exchanged: Whether gradients go to other workers, from their own flat buffers.
        num_partial_sums: Number of further buffers of gradients, in which those of virtual workers are added up.
        clip_norm: Largest gradient norm; None for no clipping.
    """

    build: Callable[[Mapping[str, Choice]], tuple[nn.Module, torch.optim.Optimizer]]
    loss: Callable[[nn.Module], Tensor]
    device: torch.device
    num_micro_batches: int = 1
    is_exchanged: bool = False
    num_partial_sums: int = 0
    clip_norm: float | None = None


@dataclass
class BlockCost:
    """Costs of a block's forward, over all its calls."""

    kept_bytes: int = 0
    """Bytes of activations that it keeps."""
    cost: float = 0.0
    """Floating-point operations of its forward; moved bytes count as such."""
    cost_of_kept: float = 0.0
    """Part of `cost` in operations whose results selective recomputation keeps."""


@dataclass(frozen=True)
class RehearsalResult:
    """Memory of a rehearsed step."""

    peak: Mapping[Category, int]
    """Bytes at the peak of the device, by purpose."""
    host: Mapping[Category, int]
    """Bytes at the peak of the host's memory, by purpose, if the device is not the host."""
    peak_activation_bytes: int
    """Peak of activations, which need not be at the peak of all bytes."""
    blocks: Mapping[str, BlockCost] = field(default_factory=dict)
    """Costs of the watched blocks, in the order of execution."""
    before_bytes: int = 0
    """Activations when the first block began."""
    after_bytes: int = 0
    """Peak of activations beyond those when the last block ended."""


def rehearse(
    step: StepDescription, choices: Mapping[str, Choice] | None = None, watched: Sequence[str] = ()
) -> RehearsalResult:
    """Run a later step of training on tensors without contents (torch's `FakeTensorMode`).

    It allocates nothing, and takes a millisecond for a few operations of the model, whatever their size. Any value that
    the model reads from a tensor is 1.

    Args:
        step: The step.
        choices: Recomputation by the block's name.
        watched: Names of the blocks whose forward is measured.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), UnknownValues():  # type: ignore[no-untyped-call]
        with step.device:
            module, optimizer = step.build(choices or {})
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        views = _make_buckets(parameters) if step.is_exchanged else []
        _make_state(optimizer, parameters)
        if step.is_exchanged:
            _attach(parameters, views)
        on_host: AbstractContextManager[StorageTracker | None] = nullcontext()
        if step.device.type != "cpu":
            on_host = counting(module, optimizer, "cpu")
        with on_host as host, counting(module, optimizer, step.device.type) as tracker:
            sums = [torch.empty_like(view) for _ in range(step.num_partial_sums) for view in views]
            tracker.label("gradients", [*views, *sums])
            tracker.reset_peak()
            watch = _Watch(tracker, {name: module.get_submodule(name) for name in watched})
            for _ in range(min(step.num_micro_batches, 2)):  # the second adds to gradients, like all later ones
                with watch.forward():
                    loss = step.loss(module)
                loss.backward()
                del loss
            if step.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, step.clip_norm)
            optimizer.step()
        return RehearsalResult(
            peak=tracker.peak,
            host=host.peak if host is not None else {},
            peak_activation_bytes=tracker.peak_activation_bytes,
            blocks=watch.uses,
            before_bytes=watch.before_bytes,
            after_bytes=watch.most_forward - watch.ended_at,
        )


def copy_without_contents(module: nn.Module) -> nn.Module:
    """Return a copy on torch's default device whose tensors have no contents of its own; what is tied stays so.

    Inside a rehearsal nothing is allocated, nor is on the meta device. That is why a model is copied there and not
    built: what initialises weights may ask for their values, and wait for ever for ones that suit it.
    """
    tensors = [leaf for part in module.modules() for leaf in tree_leaves(vars(part)) if isinstance(leaf, Tensor)]
    return copy.deepcopy(module, {id(tensor): _empty_like(tensor) for tensor in tensors})


def _empty_like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device=torch.get_default_device(), requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    vars(empty).update(vars(tensor))
    return empty


class UnknownValues(TorchDispatchMode):
    """While active, any value that is read from a tensor without contents is 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if not isinstance(args[0], FakeTensor):  # of what no rehearsal made, such as the ranks of a mesh
                with unset_fake_temporarily():
                    return func(*args)
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Measures the forward of blocks: the activations that they keep, and their operations."""

    def __init__(self, tracker: StorageTracker, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker
        self._is_open = self._is_done = False
        self._began: dict[str, tuple[int, float, float]] = {}
        self._cost = self._cost_of_kept = 0.0
        self.uses: dict[str, BlockCost] = {}
        self.before_bytes = self.ended_at = self.most_forward = 0
        for name, block in blocks.items():
            block.register_forward_pre_hook(self._begin(name))
            block.register_forward_hook(self._end(name))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context in which a micro-batch runs forward; the first one is measured."""
        if self._is_done:
            yield
            return
        self._is_open = True
        with self:
            yield
        self._is_open, self._is_done = False, True
        self.most_forward = self._tracker.peak_activation_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            cost = float(formula(*args, **(kwargs or {}), out_val=result))
        else:
            cost = _ELEMENT_FLOPS * sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self._cost += cost
        self._cost_of_kept += cost if func in KEPT else 0.0
        return result

    def _begin(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if self._is_open:
                held = self._tracker.now["activations"]
                self.before_bytes = self.before_bytes if self.uses else held
                self._began[name] = held, self._cost, self._cost_of_kept

        return hook

    def _end(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._is_open:
                self.ended_at = self._tracker.now["activations"]
                held, cost, cost_of_kept = self._began.pop(name)
                use = self.uses.setdefault(name, BlockCost())
                use.kept_bytes += self.ended_at - held
                use.cost += self._cost - cost
                use.cost_of_kept += self._cost_of_kept - cost_of_kept

        return hook


def _make_state(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Give the optimizer the state that it has after a step."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _make_buckets(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return views of one flat buffer a dtype, by parameter."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    device = parameters[0].device
    buffers = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
    views = []
    for parameter in parameters:
        end = sizes[parameter.dtype]
        sizes[parameter.dtype] -= parameter.numel()
        views.append(buffers[parameter.dtype][sizes[parameter.dtype] : end].view(parameter.shape))
    return views


def _attach(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
    """Let backward write gradients into their views of the buffers, as a replica does."""
    places = {id(parameter): view for parameter, view in zip(parameters, views, strict=True)}

    def move(parameter: Tensor) -> None:
        view = places[id(parameter)]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(move)
