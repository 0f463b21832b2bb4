"""A model's construction: recorded once on every rank, and carried out for the parameters that a rank holds."""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from types import BuiltinMethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from paceline.errors import SettingsError
from paceline.parallel.deferred.empty_storages import key_of
from paceline.parallel.deferred.generator import GENERATOR, skip
from paceline.parallel.deferred.holders import find_stranger, list_held
from paceline.parallel.deferred.python_access import watching_python
from paceline.parallel.deferred.recording import Recording
from paceline.parallel.deferred.reference import Reference
from paceline.parallel.deferred.refusal import UndeferrableError, explain, forget
from paceline.parallel.deferred.threads import watching_threads
from paceline.parallel.local import local, local_slice, wrap

_HELD = (
    "it keeps tensors that are neither parameters, buffers nor attributes of its modules, such as in a closure or a "
    "hook; read them from the module there"
)
_known = (0, False)
"""References to torch's generator when it was last looked who holds it, and whether other code than torch did."""
_NUM_LOOKS = 5
"""Number of times that it is looked, a tenth of a second apart, whether tensors of a refused construction are held."""


class Construction:
    """The construction of a model that has no memory yet.

    Args:
        recording: Operations of the construction.
        module: The model.
    """

    def __init__(self, recording: Recording, module: nn.Module) -> None:
        self._recording = recording
        self._references: dict[str, Reference] = {}
        gc.collect()
        if name := find_stranger(module, recording.knows):
            raise UndeferrableError(f"{_HELD} ({name} is held by more than modules)")
        for name, _, _, tensor in list_held(module):
            if (reference := recording.refer(tensor)) is not None:
                self._references[name] = reference
        for name, _, _, tensor in list_held(module):
            if recording.knows(tensor):
                _give(tensor, _like(tensor, self._references[name].without_memory()))
        if recording.is_held():
            raise UndeferrableError(_HELD)
        values = [tensor for _, tensor in _list_tensors(module) if not tensor.is_meta]
        self.digest = recording.digest(self._references.values(), values)
        """Text that ranks share if they construct the same."""

    def finish(self, module: nn.Module, device: torch.device) -> None:
        """Give a module, or what a layout has left of it on this rank, the values that the construction would have.

        A parameter that is cut is made in the memory of this rank's part where its elements were made one by one, and
        else in that of the whole parameter, of which the part is kept. Names are those of the whole model.

        Args:
            module: Module whose parameters are on the meta device, DTensors where they are cut.
            device: Device of the values.
        """
        made: dict[int, Tensor] = {}
        for name, container, key, tensor in [*list_held(module)]:
            if id(tensor) in made:
                container[key] = made[id(tensor)]
            elif tensor.is_meta:
                values = _like(tensor, self._make(name, tensor, device))
                if isinstance(tensor, DTensor):
                    container[key] = made[id(tensor)] = values
                else:
                    _give(tensor, values)

    def _make(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        """Return this rank's part of a tensor, with values."""
        reference = self._references[name]
        if not isinstance(tensor, DTensor):
            return self._recording.compute([reference])[0].to(device)
        shape = local(tensor).shape
        if not shape.numel():
            return wrap(tensor, torch.empty(shape, dtype=reference.dtype, device=device))
        part = local_slice(reference.without_memory(), tensor)  # a view, which knows where it begins
        values = None
        if part.is_contiguous():
            values = self._recording.compute_rows(reference, int(part.storage_offset()), part.numel())
        if values is None:
            values = local_slice(self._recording.compute([reference])[0], tensor).clone()
        return wrap(tensor, values.reshape(shape).to(device))


def defer(build: Callable[[], nn.Module]) -> tuple[nn.Module, Construction]:
    """Return a model without memory, and its construction. Torch's generator ends where building it would leave it.

    Raises:
        UndeferrableError: The model must be built whole; the message says why. The generator is where it was.
        SettingsError: Something that outlives such a model keeps tensors of its construction that cannot get values.
    """
    state = GENERATOR.get_state()
    holders = gc.get_referrers(GENERATOR)
    freezes = any(one is skip.__globals__ for one in holders)  # else what was imported is passed over already
    recording = Recording(is_generator_held=_is_held(holders) or (not freezes and _is_held_by_frozen()))
    if freezes:
        gc.freeze()  # what was there before need not be looked through for tensors of the construction
    try:
        return _record(recording, build)
    except BaseException as error:
        GENERATOR.set_state(state)
        forget(error)
        is_kept = isinstance(error, UndeferrableError) and _is_held_for_long(recording)
        if is_kept and recording.fill_held():
            raise
        recording.release()
        if is_kept:
            raise SettingsError(
                f"a model must be built without tensors that outlive it, but {error}, and a cache, a class or a thread "
                "still keeps tensors of the abandoned construction, which never get values; fill that cache "
                "before the run, or clear it as the model's construction begins"
            ) from error
        raise
    finally:
        if freezes:
            gc.unfreeze()


def _is_held(holders: list[Any]) -> bool:
    """Whether other code than torch is among the holders of torch's generator, and may ask for its state any time."""
    names = {"torch", "torch._C", "torch.random", "torch.utils.data.dataset"}
    ours, of_dynamo = f"{skip.__module__.rpartition('.')[0]}.", _list_methods_of_dynamo()
    return any(
        not (isinstance(one, dict) and ((name := str(one.get("__name__"))) in names or name.startswith(ours)))
        for one in holders
        if id(one) not in of_dynamo
    )


def _list_methods_of_dynamo() -> set[int]:
    """Return the identities of the generator's methods in Dynamo's table of torch's functions, if that is made yet."""
    table: Any = getattr(sys.modules.get("torch._dynamo.trace_rules"), "get_torch_obj_rule_map", None)
    is_made = table is not None and table.cache_info().currsize > 0
    return {id(one) for one in table() if isinstance(one, BuiltinMethodType)} if is_made else set()


def _is_held_by_frozen() -> bool:
    """Whether other code than torch, which the collector passes over, holds torch's generator.

    Looked for where there are other references than last time, since that takes some ten milliseconds.
    """
    global _known
    if sys.getrefcount(GENERATOR) != _known[0]:
        gc.collect(1)  # what is new and held by nobody need not be frozen too
        gc.unfreeze()
        is_held = _is_held(gc.get_referrers(GENERATOR))
        gc.freeze()
        _known = sys.getrefcount(GENERATOR), is_held
    return _known[1]


def _record(recording: Recording, build: Callable[[], nn.Module]) -> tuple[nn.Module, Construction]:
    module = _build(recording, build)
    try:
        _check(recording, module)
        construction = Construction(recording, module)
    except (AssertionError, RuntimeError) as error:  # such as of a parameter whose `data` has values
        raise explain(error) from error
    recording.settle()
    return module, construction


def _is_held_for_long(recording: Recording) -> bool:
    """Whether tensors are held even after a moment, in which threads may let go of what they have worked on."""
    for _ in range(_NUM_LOOKS):
        if not recording.is_held():
            return False
        time.sleep(0.1)
    return True


class _ErrorWatch(TorchFunctionMode):
    """Context that notes the errors of torch's functions, which the code that builds a model may catch."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._recording.watch(getattr(func, "__name__", func)):
            return func(*args, **(kwargs or {}))


def _build(recording: Recording, build: Callable[[], nn.Module]) -> nn.Module:
    module, failure = None, None
    try:
        with recording, _ErrorWatch(recording), watching_python(recording), watching_threads(recording):
            module = build()
    except Exception as error:
        failure = error
    if recording.refusal is not None:
        raise recording.refusal from failure
    if module is None:
        assert failure is not None
        raise explain(failure) from failure
    return module


def _check(recording: Recording, module: nn.Module) -> None:
    """Raise `UndeferrableError` if a module cannot be finished parameter by parameter."""
    named = [(name, tensor) for name, _, _, tensor in list_held(module)]
    owners: dict[int, int] = {}
    for name, tensor in named:
        if is_lazy(tensor):
            raise UndeferrableError(
                "it has lazy modules, whose sizes a first batch decides; give sizes, such as nn.Linear for "
                "nn.LazyLinear"
            )
        is_recorded = recording.knows(tensor)
        if reason := _find_reason(tensor, is_recorded=is_recorded):
            raise UndeferrableError(f"{name} {reason}")
        if is_recorded and owners.setdefault(key_of(tensor), id(tensor)) != id(tensor):
            raise UndeferrableError(f"{name} shares memory with another tensor and is not the same")


def _find_reason(tensor: Tensor, *, is_recorded: bool) -> str:
    """Return why a tensor of a module cannot be made later, if so."""
    kind = type(tensor)
    if tensor.is_meta:
        return "has no memory in the model itself"
    if not is_recorded and not isinstance(tensor, nn.Parameter):
        return ""
    if tensor.is_inference():
        return "is made in inference mode; make it in torch.no_grad()"
    if kind not in (nn.Parameter, Tensor) or _list_hooks(tensor):
        return f"is a {kind.__name__} of its own kind, or has hooks"
    if tensor.grad_fn is not None or tensor.grad is not None:
        return "has a gradient, or is computed from a tensor that needs one"
    return ""


def _list_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _list_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    hooks = [*(parameter._backward_hooks or {}).values()]
    return [*hooks, *(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()]


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return `values` as what `tensor` is: a parameter or not, with its attributes and its hooks on gradients."""
    requires_grad = tensor.requires_grad
    like = nn.Parameter(values, requires_grad) if isinstance(tensor, nn.Parameter) else values
    if not isinstance(tensor, nn.Parameter):
        like.requires_grad_(requires_grad)
    if isinstance(tensor, DTensor):
        vars(like).update(vars(tensor))
    for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
        like.register_post_accumulate_grad_hook(hook)
    return like


def _give(tensor: Tensor, values: Tensor) -> None:
    """Make a tensor what another is, while it stays the object that code may know by its identity or a weak reference.

    Attributes are those that it had.
    """
    torch._C._swap_tensor_impl(tensor, values)
