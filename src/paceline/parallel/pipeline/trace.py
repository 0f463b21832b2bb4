"""A model's forward as it calls its parts, recorded once: what each part needs of the parts before it."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from paceline.data.batch import call, describe, is_record, map_tensors
from paceline.data.batch import list_tensors as list_results
from paceline.errors import SettingsError
from paceline.parallel.pipeline.absent import list_changed, list_tensors, reads_values
from paceline.parallel.pipeline.draws import draws
from paceline.parallel.pipeline.layers import LAYERS_ADVICE, AbsentModule, PipelineLayer, find_owned
from paceline.parallel.trial import CACHES, restored

Source = tuple[int, int]
"""Origin of a tensor: the number of a call (`INPUTS` for the model's inputs) and the place among its tensors."""
INPUTS = -1
CallModule = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Function that takes the place of the call of a module, given its arguments."""
Checkpoint = Callable[[], Iterator[None]]
"""Function that begins a `torch.utils.checkpoint`: torch's generator, which yields once, while its function runs."""


@dataclass(frozen=True)
class Structure:
    """Nesting of tensors and other values, without the tensors."""

    spec: TreeSpec
    values: tuple[Any, ...]
    """Values in their order, None in the place of each tensor."""
    places: tuple[int, ...]
    """Places of the tensors among the values."""

    @classmethod
    def of(cls, data: Any) -> tuple["Structure", list[Tensor]]:
        """Return the structure of `data`, and its tensors."""
        values, spec = tree_flatten(dict(data) if isinstance(data, Mapping) and type(data) is not dict else data)
        places = tuple(i for i, value in enumerate(values) if isinstance(value, Tensor))
        tensors = [values[i] for i in places]
        others = tuple(None if isinstance(value, Tensor) else value for value in values)
        return cls(spec, others, places), tensors

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return the data with other tensors."""
        values = list(self.values)
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        return tree_unflatten(values, self.spec)


class Described(NamedTuple):
    """Properties of a tensor that are the same for any inputs."""

    num_dims: int
    has_gradient: bool


@dataclass(frozen=True)
class PartCall:
    """Call of a part of the model by the forward of a module around it."""

    name: str
    """Name of the submodule."""
    output: Structure
    tensors: tuple[Described, ...]
    """Tensors of the output."""
    needs: frozenset[Source | str]
    """Outputs of earlier calls and inputs of the model that the arguments use, with names of parameters and buffers:
    those of the arguments, and of other modules that the submodule refers to."""
    is_joined: bool = False
    """Whether one `torch.utils.checkpoint` is around this call and the one before: its function is run again as a
    whole."""


@dataclass
class ForwardTrace:
    """Calls of a model's parts in one forward, in their order.

    A part is a submodule that an *opened* module calls in its own forward: a block, an embedding, a head. Opened are
    the model and what contains a list of blocks. All that their forwards do between calls (masks, positions, sums) is
    no part of the record but its effect: which of the earlier results a call uses.
    """

    opened: frozenset[str]
    inputs: Structure
    """Inputs of the model."""
    input_tensors: tuple[Described, ...]
    calls: list[PartCall] = field(default_factory=list)
    output_needs: frozenset[Source | str] = frozenset()
    """Outputs, inputs and names, as in `PartCall.needs`, that the model's output uses."""
    changed: frozenset[Source] = frozenset()
    """Inputs and outputs that something changes in place after a call has returned them."""
    read: frozenset[Source | str] = frozenset()
    """Names, inputs and outputs that forwards between the calls read as numbers, to choose what they do."""
    draws: bool = False
    """Whether forwards between the calls draw random numbers."""
    names: WeakKeyDictionary[nn.Module, str] = field(default_factory=WeakKeyDictionary, compare=False, repr=False)
    """Names of the modules of the whole model."""
    sent: dict[tuple[Any, ...], list[int]] = field(default_factory=dict, compare=False, repr=False)
    """Shapes and dtypes that crossed a call, by it and the shapes of what crossed it, in a rehearsal: there tensors
    have no values that could be sent."""

    def is_call(self, number: int, module: nn.Module, model: nn.Module) -> bool:
        """Return whether `module` is what a call was of, also where another rank's has a placeholder in its place."""
        name = self.calls[number].name
        return model.get_submodule(name) is module or self.names.get(module) == name

    def tensors_of(self, number: int) -> tuple[Described, ...]:
        """Return the tensors of the inputs, or of the output of a call."""
        return self.input_tensors if number == INPUTS else self.calls[number].tensors

    def is_part(self, module: nn.Module, model: nn.Module) -> bool:
        """Return whether a module is one of the model's, or takes the place of one."""
        return module in self.names or isinstance(module, AbsentModule) or module in set(model.modules())

    def join(self, other: "ForwardTrace") -> "ForwardTrace":
        """Return a trace with all uses of this one, and those of another one that makes the same calls."""
        calls = zip(self.calls, other.calls, strict=True)
        return replace(
            self,
            calls=[replace(call, needs=call.needs | its.needs) for call, its in calls],
            output_needs=self.output_needs | other.output_needs,
            changed=self.changed | other.changed,
            read=self.read | other.read,
            draws=self.draws or other.draws,
        )

    def find_crossing(self, begin: int) -> list[Source]:
        """Return the tensors from before call `begin` that it or what follows uses: inputs first."""
        needs = self.output_needs.union(self.read, *(made.needs for made in self.calls[begin:]))
        return sorted(one for one in needs if not isinstance(one, str) and one[0] < begin)

    def find_parameters(self, begin: int, end: int) -> list[str]:
        """Return the names of the parameters and buffers used between calls for those from `begin` to `end`."""
        needs = self.read.union(*(made.needs for made in self.calls[begin:end]))
        if end == len(self.calls):
            needs |= self.output_needs
        return sorted(one for one in needs if isinstance(one, str))


class ForwardRecorder(TorchFunctionMode):
    """Mode under which one forward of a model makes its `ForwardTrace`."""

    def __init__(self, model: nn.Module, opened: frozenset[str], inputs: Any) -> None:
        super().__init__()
        self._names = WeakKeyDictionary({module: name for name, module in model.named_modules()})
        self._opened = [model.get_submodule(name) for name in sorted(opened)]
        structure, tensors = Structure.of(inputs)
        self.trace = ForwardTrace(opened, structure, _describe(tensors), names=self._names)
        self._needs: dict[int, frozenset[Source | str]] = {}
        self._kept: list[Any] = []  # so that no storage has the address of an earlier one
        self._versions: dict[Source, tuple[Tensor, int]] = {}
        self._reads: frozenset[Source | str] = frozenset()
        self._is_inside = False
        self._is_recomputed = self._is_recomputed_on = False
        self._used: frozenset[Source | str] = frozenset()
        """Results and parameters that the present part uses."""
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self._needs.setdefault(_key(tensor), frozenset({name}))
        for number, tensor in enumerate(tensors):
            self._needs[_key(tensor)] = frozenset({(INPUTS, number)})
            self._versions[INPUTS, number] = tensor, tensor._version

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch between two calls, and note that its results use its arguments."""
        kwargs = kwargs or {}
        if self._is_inside:
            self._used |= self._of((args, kwargs))
            return func(*args, **kwargs)
        needs = self._of((args, kwargs))
        self.trace.draws |= draws(func, kwargs)
        result = func(*args, **kwargs)
        if reads_values(func, result):
            self._reads |= needs
        for tensor in list_changed(func, args, kwargs, result):
            self._add(tensor, needs)
        return result

    def call_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a part of the model, and add it to the trace."""
        number = len(self.trace.calls)
        needs = self._of((args, kwargs))
        is_joined, self._is_recomputed_on = self._is_recomputed_on, self._is_recomputed
        self._is_inside, self._used = True, frozenset()
        try:
            output = call_module(module, *args, **kwargs)
        finally:
            self._is_inside = False
        own = self._of([*module.parameters(), *module.buffers()])
        needs |= {one for one in self._used - own if isinstance(one, str)}  # of modules that it refers to
        structure, tensors = Structure.of(output)
        if odd := [value for value in structure.values if not isinstance(value, str | bool | None)]:
            raise SettingsError(
                f"a part of a model run as a pipeline must return tensors, but {self._names[module]} returns "
                f"{type(odd[0]).__name__} too; {LAYERS_ADVICE}"
            )
        made: dict[int, frozenset[Source | str]] = {}
        for place, tensor in enumerate(tensors):  # several of which may share memory
            made[_key(tensor)] = made.get(_key(tensor), frozenset()) | {(number, place)}
        self._needs |= made
        for place, tensor in enumerate(tensors):
            self._versions[number, place] = tensor, tensor._version
        self._kept.append(tensors)
        self.trace.calls.append(PartCall(self._names[module], structure, _describe(tensors), needs, is_joined))
        return output

    def recompute(self, begin: Checkpoint) -> Iterator[None]:
        """Run a checkpoint, and note that the calls in it are no two layers."""
        is_outermost, self._is_recomputed = not self._is_recomputed, True
        try:
            yield from begin()
        finally:
            if is_outermost:
                self._is_recomputed = self._is_recomputed_on = False

    def finish(self, output: Any) -> ForwardTrace:
        """Return the trace of a forward that has returned `output`."""
        kept = list_tensors([vars(part) for part in self._opened])
        made = [self._needs.get(_key(tensor), frozenset()) for tensor in kept]  # a loss, or a next forward, reads it
        needs = [one for one in made if any(not isinstance(source, str) for source in one)]
        self.trace.output_needs, self.trace.read = self._of(list_results(output)).union(*needs), self._reads
        versions = self._versions.items()
        self.trace.changed = frozenset(one for one, (tensor, version) in versions if tensor._version != version)
        return self.trace

    def _of(self, data: Any) -> frozenset[Source | str]:
        found: frozenset[Source | str] = frozenset()
        for tensor in list_tensors(data):
            known = self._needs.get(_key(tensor))
            if known is None and tensor.grad_fn is not None and not self._is_inside:
                raise SettingsError(
                    "a model run as a pipeline must pass results of its blocks on as arguments and outputs, but its "
                    f"forward takes a tensor of the shape {tuple(tensor.shape)} from elsewhere, such as an attribute "
                    f"that a block has set; {LAYERS_ADVICE}"
                )
            found |= known or frozenset()
        return found

    def _add(self, tensor: Tensor, needs: frozenset[Source | str]) -> None:
        key = _key(tensor)
        self._needs[key] = self._needs.get(key, frozenset()) | needs
        self._kept.append(tensor)


class UseRecorder(TorchFunctionMode):
    """Mode that notes which parameters and buffers of a model are used."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {_key(one): name for name, one in [*model.named_parameters(), *model.named_buffers()]}
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        keys = map(_key, list_tensors((args, kwargs)))
        self.names.update(self._names[key] for key in keys if key in self._names)
        return func(*args, **(kwargs or {}))


def _key(tensor: Tensor) -> int:
    """Return the number of a tensor's storage."""
    with torch._C.DisableTorchFunction():
        try:
            return int(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a wrapper, as inside torch.vmap
            return id(tensor)


def own_used(module: nn.Module, layers: list[PipelineLayer], sample: Any) -> list[PipelineLayer]:
    """Return listed layers that own what they use of each other too, by references that are no submodules of theirs."""
    tensors = tuple(list_results(sample))
    named = [*module.named_parameters(), *module.named_buffers()]
    found: list[PipelineLayer] = []
    value: Any = tensors[0] if len(tensors) == 1 else tensors
    try:
        with restored(module), torch.no_grad():
            for layer in layers if tensors else ():
                with UseRecorder(module) as uses:
                    value = layer.run(value)
                own = find_owned(module, [layer])
                others = [name for name, one in named if name in uses.names and one not in own]
                found.append(replace(layer, owns=(*layer.owns, *others)))
    except Exception:  # which a trial of the stages names
        return layers
    return found or layers


_here = threading.local()
call_module = nn.Module.__call__
"""Torch's own way to call a module."""


@contextmanager
def calls_replaced(
    model: nn.Module, trace: ForwardTrace, replacement: CallModule, recompute: Callable[[Checkpoint], Iterator[None]]
) -> Iterator[None]:
    """While active, this thread calls `replacement` where an opened module of `model` calls a part.

    It calls `recompute` where one begins a `torch.utils.checkpoint`. Inside of a call of a part modules and checkpoints
    are as always. A module that is none of the model's, such as a slice of an `nn.Sequential`, does what its own
    forward says, as an opened one.
    """
    inside = {model.get_submodule(name) for name in trace.opened}

    def replaced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(_here, "model", None) is not model or module in inside or not trace.is_part(module, model):
            return call_module(module, *args, **kwargs)
        _here.model = None
        nn.Module.__call__ = call_module  # type: ignore[method-assign]
        try:
            return replacement(module, args, kwargs)
        finally:
            _here.model = model
            nn.Module.__call__ = replaced  # type: ignore[method-assign]

    def begin(*args: Any, **kwargs: Any) -> Iterator[None]:
        own = partial(_begin_checkpoint, *args, **kwargs)
        return recompute(own) if getattr(_here, "model", None) is model else own()

    # As torch.fx does while it traces; hooks, FSDP and compiled blocks stay what they are.
    _here.model = model
    torch.utils.checkpoint.CheckpointFunction = _Checkpoint  # type: ignore[misc, assignment]
    torch.utils.checkpoint._checkpoint_without_reentrant_generator = begin
    nn.Module.__call__ = replaced  # type: ignore[method-assign]
    try:
        yield
    finally:
        _here.model = None
        nn.Module.__call__ = call_module  # type: ignore[method-assign]
        replaced = call_module  # else the function would hold itself, and with it all results of the run
        torch.utils.checkpoint.CheckpointFunction = _TorchCheckpoint  # type: ignore[misc]
        torch.utils.checkpoint._checkpoint_without_reentrant_generator = _begin_checkpoint


_begin_checkpoint = torch.utils.checkpoint._checkpoint_without_reentrant_generator
_TorchCheckpoint = torch.utils.checkpoint.CheckpointFunction


class _Checkpoint:
    """Recomputation of ``use_reentrant=True`` as that of False: with the first, results inside have no gradients."""

    @staticmethod
    def apply(function: Callable[..., Any], keeps_random_state: bool, *args: Any) -> Any:
        """Run a function, whose results have no gradients either if none of its arguments has."""
        if any(isinstance(one, Tensor) and one.requires_grad for one in args):
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=keeps_random_state)
        with torch.no_grad():
            return function(*args)


def record(model: nn.Module, opened: frozenset[str], inputs: Any) -> ForwardTrace:
    """Run a model forward on `inputs`, and return its trace."""
    inputs = map_tensors(lambda tensor: tensor.clone(), inputs)  # no two of which share memory
    recorder = ForwardRecorder(model, opened, inputs)
    keeps_nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda _: torch.empty(0))
    replaced = calls_replaced(model, recorder.trace, recorder.call_part, recorder.recompute)
    with recorder, replaced, torch.enable_grad(), keeps_nothing:
        return recorder.finish(find_output(call(model, inputs)))


def find_output(output: Any) -> Any:
    """Return a model's output as a loss gets it: any nesting of tensors, without caches of keys and values.

    Raises:
        SettingsError: The output holds no tensors that are found.
    """
    if isinstance(output, Mapping) and is_record(output):  # of transformers
        output = type(output)(**{key: value for key, value in output.items() if key not in CACHES})
    if not list_results(output):
        raise SettingsError(
            "a model run as a pipeline must return tensors, or tuples, lists, mappings, dataclasses or namespaces of "
            f"such, but got {describe(output)}; return the tensors that the loss is computed from in one of these"
        )
    return output


def _describe(tensors: Sequence[Tensor]) -> tuple[Described, ...]:
    return tuple(Described(tensor.dim(), tensor.requires_grad) for tensor in tensors)
