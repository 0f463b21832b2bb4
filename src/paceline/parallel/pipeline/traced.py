"""A model whose forward is no plain sequence, cut where it calls its blocks: each rank runs that forward in part.

The forward of the model itself runs on every rank, on the calls that are its own; all other calls return what the
rank before has sent, or, where only shapes matter, an empty tensor. It stops before the first call of the next rank. So
masks, positions and whatever else is computed between calls is as in the whole model, for any inputs.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paceline.comm.streams import send_to
from paceline.data.batch import call, describe, list_tensors, map_tensors
from paceline.errors import PacelineError, SettingsError
from paceline.parallel.mesh import Mesh
from paceline.parallel.pipeline.absent import ADVICE, Tracking, find_missing, mark_missing
from paceline.parallel.pipeline.draws import draw_seed
from paceline.parallel.pipeline.gradient_check import find_wrong_gradient, pair_up
from paceline.parallel.pipeline.layers import LAYERS_ADVICE, HasPipelineLayers, PipelineLayer, find_owned, list_layers
from paceline.parallel.pipeline.trace import (
    INPUTS,
    ForwardTrace,
    Source,
    call_module,
    calls_replaced,
    find_output,
    own_used,
    record,
)
from paceline.parallel.trial import evaluating, is_random, restored, training, vary, without_constants

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_MAX_SHAPES = 64
_TOLERANCE = 1e-4
"""Largest relative difference of an output, for sums in another order; one of something else is larger."""


def find_layers(module: nn.Module, sequence: Sequence[str] = (), sample: Any = None) -> list[PipelineLayer]:
    """Return the layers of any model: those that it lists, or those found by running it once on `sample`.

    Args:
        module: Model.
        sequence: See `list_layers`.
        sample: Inputs of the model for at least one sample, as its forward takes them: a mapping by name.

    Raises:
        SettingsError: The model cannot be cut.
    """
    if sequence or sample is None or is_listed(module):
        return own_used(module, list_layers(module, sequence), sample)
    opened = find_opened(module)
    with restored(module):
        try:
            kept = _list_kept(module, opened)
            trace = record(module, opened, sample)
            _refuse_kept(_list_kept(module, opened) - kept)
            samples = [sample, *_vary(module, sample)]
            for other in samples[1:]:
                trace = _join_traces(trace, record(module, opened, other))
            layers = _make_layers(module, trace)
            _check(module, layers, samples)
        except PacelineError:
            raise
        except Exception as error:
            raise SettingsError(
                f"a model must run on a sample to be cut into stages, but {type(module).__name__} says on "
                f"{describe(sample)}: {type(error).__name__}: {str(error).partition(chr(10))[0]}; {LAYERS_ADVICE}"
            ) from error
    return layers


def is_listed(module: nn.Module) -> bool:
    """Return whether a model says itself what its layers are."""
    return isinstance(module, HasPipelineLayers) or type(module) is nn.Sequential


def find_opened(module: nn.Module) -> frozenset[str]:
    """Return the names of the modules around the blocks, the model's own among them.

    Blocks are what the model's plan for a pipeline names (``_pp_plan`` of transformers), or the children of the
    outermost lists.
    """
    base = getattr(module, "base_model", module)
    planned = getattr(getattr(module, "config", None), "base_model_pp_plan", None) or {}
    place = next((name for name, child in module.named_modules() if child is base), "")
    names = [f"{place}.{name}" if place else name for name in planned]
    modules = dict(module.named_modules())
    lists = [name for name in names if isinstance(modules.get(name), _LISTS)] or list(_find_lists(module, ""))
    opened = {""}
    for name in lists:
        parts = name.split(".")
        opened.update(".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return frozenset(opened)


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _find_lists(module: nn.Module, prefix: str) -> list[str]:
    found = []
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if isinstance(child, _LISTS) and any(True for _ in child.parameters()):
            found.append(name)
            nested = [(f"{name}.{i}", part) for i, part in child.named_children() if isinstance(part, _LISTS[:2])]
            found += [inner for at, part in nested for inner in [at, *_find_lists(part, f"{at}.")]]
        elif not isinstance(child, _LISTS):
            found += _find_lists(child, f"{name}.")
    return found


@dataclass(frozen=True)
class Part:
    """Part of a model's forward: its calls from `begin` to before `end`, as the function of a `PipelineLayer`.

    Its value is a tuple of the tensors that cross its beginning (`ForwardTrace.find_crossing`), and, but for the first,
    one of the shapes and dtypes of all others from before it, and of a random seed if forwards draw between calls.
    """

    model: nn.Module
    trace: ForwardTrace
    begin: int
    end: int
    fills_with: float = 0.0
    """Value of tensors of which only the shape matters."""
    shares_draws: bool = True
    """Whether what forwards draw between calls is the same in all parts, by a seed that the first one draws."""
    shapes: dict[tuple[Any, ...], dict[Source, list[int]]] = field(default_factory=dict, compare=False, repr=False)
    """Shapes and dtypes of these tensors, by the shapes of those that cross the beginning."""

    def __call__(self, value: Any) -> Any:
        """Return what crosses the end, or the model's output."""
        run = _PartRun(self, (value,) if isinstance(value, Tensor) else value)
        try:
            with run.tracking, calls_replaced(self.model, self.trace, run.call_part):
                output = call(self.model, run.fill(INPUTS))
        except _EndOfPartError:
            return run.finish()
        finally:
            run.close()
        if self.end < len(self.trace.calls) or run.number < self.end:
            raise run.refuse("nothing more")
        output = find_output(output)
        run.refuse_missing(list_tensors(output), "its output")
        return output

    def join(self, later: "Part") -> "Part":
        """Return this part and one that begins at its end as one."""
        return replace(self, end=later.end)


class _EndOfPartError(BaseException):
    """Signal that the forward of a model has come to the end of a part; no `except` of a model's takes it."""


class _PartRun:
    """One run of a part."""

    def __init__(self, part: Part, value: tuple[Tensor, ...]) -> None:
        self._part = part
        self._trace = part.trace
        self.tracking = Tracking()
        """Mode in which the forward runs between calls."""
        self.number = 0
        """Number of calls made."""
        self._seed = 0
        """Random seed of what is drawn between calls."""
        shares_draws = self._trace.draws and part.shares_draws and not isinstance(value[0], FakeTensor)
        if part.begin == 0:
            self._known = {(INPUTS, place): tensor for place, tensor in enumerate(value)}
            self._shapes: dict[Source, list[int]] = {}
            if shares_draws:
                self._seed = self.tracking.share_draws(draw_seed(), value[0].device)
            return
        crossing = self._trace.find_crossing(part.begin)
        self._known = dict(zip(crossing, value[:-1], strict=True))
        key = (part.begin, *(tensor.shape for tensor in value[:-1]))
        if shares_draws or value[-1].device.type == "cpu" or key not in part.shapes:  # the host waits for a GPU
            if len(part.shapes) == _MAX_SHAPES:
                part.shapes.clear()
            is_rehearsed = isinstance(value[-1], FakeTensor)
            numbers = self._trace.sent[key] if is_rehearsed else value[-1].tolist()
            part.shapes[key] = _decode(self._trace, part.begin, numbers)
            if shares_draws:
                self._seed = self.tracking.share_draws(numbers[-1], value[0].device)
        self._shapes = part.shapes[key]

    def call_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of this part, or return what it would."""
        number, calls = self.number, self._trace.calls
        if number >= len(calls) or self._part.model.get_submodule(calls[number].name) is not module:
            known = {id(one): name for name, one in self._part.model.named_modules()}
            raise self.refuse(known.get(id(module), type(module).__name__))
        if number == self._part.end:
            raise _EndOfPartError
        self.number += 1
        if number < self._part.begin:
            output = self.fill(number)
            self.tracking.unhooked += list_tensors(output)
            return output
        self.tracking.unhooked.clear()
        self.refuse_missing((args, kwargs), calls[number].name)
        with self.tracking.paused():
            output = call_module(module, *args, **kwargs)
        structure, tensors = calls[number].output.of(output)
        if structure != calls[number].output or [one.dim() for one in tensors] != [
            one.num_dims for one in calls[number].tensors
        ]:
            raise self.refuse(f"{calls[number].name} with another output, {describe(output)}")
        sources = [(number, place) for place in range(len(tensors))]
        self._known |= zip(sources, tensors, strict=True)
        if not self._trace.changed.intersection(sources):
            return output
        return structure.fill([self._own(source, one) for source, one in zip(sources, tensors, strict=True)])

    def fill(self, number: int) -> Any:
        """Return the inputs or the output of an earlier call: what was sent, and empty tensors of the right shape."""
        found = self._trace.inputs if number == INPUTS else self._trace.calls[number].output
        sources = [(number, place) for place in range(len(self._trace.tensors_of(number)))]
        known = self._known
        return found.fill([self._own(one, known[one]) if one in known else self._make(one) for one in sources])

    def _own(self, source: Source, tensor: Tensor) -> Tensor:
        """Return a tensor for the forward, one of its own if it is changed in place there: what is sent is not."""
        return tensor.clone() if source in self._trace.changed else tensor

    def finish(self) -> tuple[Tensor, ...]:
        """Return what crosses the end of the part."""
        values = [self._known[source] for source in self._trace.find_crossing(self._part.end)]
        self.refuse_missing(values, "what is sent to the next stage")
        numbers: list[int] = []
        for source in _find_shaped(self._trace, self._part.end):
            known = self._known.get(source)
            numbers += [DTYPES.index(known.dtype), *known.shape] if known is not None else self._shapes[source]
        numbers += [self._seed] if self._trace.draws else []
        if isinstance(values[0], FakeTensor):
            self._trace.sent[self._part.end, *(value.shape for value in values)] = numbers
        return (*values, send_to(values[0].device, torch.tensor(numbers, dtype=torch.int64)))

    def close(self) -> None:
        """Forget all results, which whoever holds the run would keep."""
        self._known.clear()

    def refuse_missing(self, data: Any, user: str) -> None:
        """Raise `SettingsError` if tensors come from what this part does not have."""
        if missing := find_missing(data):
            raise SettingsError(
                "a model run as a pipeline must use the same results and parameters in each part of its forward as on "
                f"the sample, but {user} comes from {missing}; {ADVICE}"
            )

    def refuse(self, what: str) -> SettingsError:
        """Return the error of a forward that is not the recorded one."""
        calls = self._trace.calls
        wanted = calls[self.number].name if self.number < len(calls) else "the end"
        return SettingsError(
            f"a model run as a pipeline must call its parts in the order in which it did on the sample, but call "
            f"{self.number + 1} is {what}, where it was {wanted}; {LAYERS_ADVICE}"
        )

    def _make(self, source: Source) -> Tensor:
        dtype, *shape = self._shapes[source]
        device = next(iter(self._known.values())).device
        made = torch.empty(shape, dtype=DTYPES[dtype], device=device)
        if not made.is_floating_point():
            made.zero_()  # it may be an index
        elif self._part.fills_with:
            made.fill_(self._part.fills_with)
        number, place = source
        owner = f"input {place + 1}" if number == INPUTS else f"the output of {self._trace.calls[number].name}"
        mark_missing(made, f"{owner}, which the sample did not use there")
        return made


def _find_shaped(trace: ForwardTrace, end: int) -> list[Source]:
    """Return the tensors from before call `end` whose shapes cross it, but not their values."""
    everything = [(number, i) for number in range(INPUTS, end) for i in range(len(trace.tensors_of(number)))]
    crossing = set(trace.find_crossing(end))
    return [source for source in everything if source not in crossing]


def _decode(trace: ForwardTrace, begin: int, numbers: Sequence[int]) -> dict[Source, list[int]]:
    shapes, at = {}, 0
    for number, place in _find_shaped(trace, begin):
        length = 1 + trace.tensors_of(number)[place].num_dims
        shapes[number, place] = [*numbers[at : at + length]]
        at += length
    return shapes


def _make_layers(module: nn.Module, trace: ForwardTrace) -> list[PipelineLayer]:
    """Return a layer for each call of a block, and one for the calls before them; others are of the block before."""
    lists = {name for name in trace.opened if isinstance(module.get_submodule(name), _LISTS)}
    blocks = [i for i, made in enumerate(trace.calls) if made.name.rpartition(".")[0] in lists]
    if not blocks:  # no lists: a layer for each call that has something to learn
        blocks = [
            i for i, made in enumerate(trace.calls) if any(True for _ in module.get_submodule(made.name).parameters())
        ]
    after = blocks[-1] + 1 if blocks else 0
    begins = sorted({0, *blocks, *([after] if after < len(trace.calls) else [])})
    layers: list[PipelineLayer] = []
    for begin, end in pairwise([*begins, len(trace.calls)]):
        names = dict.fromkeys(made.name for made in trace.calls[begin:end])
        owns = (
            *(name for name in names if _has_tensors(module.get_submodule(name))),
            *trace.find_parameters(begin, end),
        )
        name = next(iter([*owns, *names]), "model")
        number = sum(layer.name.partition(" ")[0] == name for layer in layers)
        name = f"{name} {number + 1}" if number else name
        layers.append(PipelineLayer(name, owns, Part(module, trace, begin, end)))
    return _own_rest(module, layers)


def _own_rest(module: nn.Module, layers: list[PipelineLayer]) -> list[PipelineLayer]:
    """Give the tensors that no call used, such as those of a pooler whose output is dropped, to the last layer."""
    used = {id(tensor) for tensor in find_owned(module, layers)}
    named = [*module.named_parameters(), *module.named_buffers()]
    rest = tuple(name for name, tensor in named if id(tensor) not in used)
    return [*layers[:-1], replace(layers[-1], owns=(*layers[-1].owns, *rest))]


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in [*module.parameters(), *module.buffers()])


def list_opened(layers: Sequence[PipelineLayer]) -> frozenset[str]:
    """Return the names of the modules whose forward runs on every rank."""
    runs = [layer.run for layer in layers]
    return frozenset().union(*(run.trace.opened for run in runs if isinstance(run, Part)))


def check_same_layers(layers: Sequence[PipelineLayer], mesh: Mesh) -> None:
    """Raise `SettingsError` if ranks have found different layers."""
    runs = [layer.run for layer in layers]
    crossing = [[list(source) for source in run.trace.find_crossing(run.end)] for run in runs if isinstance(run, Part)]
    if not crossing:
        return
    mine = [[layer.name for layer in layers], crossing]
    everybody = mesh.world.gather_documents(mine, name="layers of a pipeline")
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            raise SettingsError(
                f"every rank must find the same layers of a model, but rank {rank} has {theirs} where rank 0 has "
                f"{everybody[0]}; give all ranks the same sample"
            )


def list_gradients(run: Any, tensors: Sequence[Tensor], gives: bool) -> tuple[bool, ...]:
    """Return for each tensor that a layer's function has returned whether a gradient comes back for it.

    Args:
        run: The function.
        tensors: Tensors that it has returned.
        gives: Whether anything before it is trained, or it itself.
    """
    known = [gives and (tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors]
    if isinstance(run, Part) and run.end < len(run.trace.calls):
        crossing = run.trace.find_crossing(run.end)
        return (*(run.trace.tensors_of(number)[place].has_gradient for number, place in crossing), False)
    return tuple(known)


def adopt_shapes(layers: Sequence[PipelineLayer], others: Sequence[PipelineLayer]) -> None:
    """Let layers know, in a rehearsal, the shapes that crossed those of the same model elsewhere."""
    for layer, other in zip(layers, others, strict=True):
        if isinstance(layer.run, Part) and isinstance(other.run, Part):
            layer.run.trace.sent.update(other.run.trace.sent)


def join_parts(layers: Sequence[PipelineLayer]) -> list[Any]:
    """Return the functions of consecutive layers, those of parts of one forward as one."""
    functions: list[Any] = []
    for layer in layers:
        last = functions[-1] if functions else None
        if isinstance(layer.run, Part) and isinstance(last, Part):
            functions[-1] = last.join(layer.run)
        else:
            functions.append(layer.run)
    return functions


def _vary(module: nn.Module, sample: Any) -> list[Any]:
    """Return a sample of other values, if the model takes it, in a list."""
    other = vary(sample)
    try:
        with torch.no_grad(), restored(module):
            call(module, map_tensors(torch.clone, other))
    except Exception:  # such as an index out of range
        return []
    return [other]


def _join_traces(trace: ForwardTrace, other: ForwardTrace) -> ForwardTrace:
    """Return a trace of what two samples use, if both make the same calls; else that of the first."""
    is_alike = [made.name for made in trace.calls] == [made.name for made in other.calls]
    return trace.join(other) if is_alike else trace


def _list_kept(module: nn.Module, opened: frozenset[str]) -> set[str]:
    """Return the names of the attributes of blocks that hold a result with a gradient."""
    return {
        f"{name}.{key}"
        for name, part in module.named_modules()
        if name not in opened
        for key, value in vars(part).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    }


def _refuse_kept(names: Set[str]) -> None:
    if names:
        raise SettingsError(
            "a part of a model run as a pipeline must return its results, since a loss would miss what other stages "
            f"keep, but {min(names)} is set by a forward; return it, keep it detached if it is only looked at, or set "
            "Layout(pipeline=1) (--layout.pipeline 1)"
        )


def _check(module: nn.Module, layers: Sequence[PipelineLayer], samples: Sequence[Any]) -> None:
    """Refuse a model whose layers, one after the other, compute something else than its forward.

    Each layer takes all samples before the next one does, from the state of the whole model, as ranks of a pipeline do.
    It is compared in evaluation, and in training without dropout unless that still draws random numbers, then with its
    gradients.
    """
    if any(isinstance(parameter, FakeTensor) for parameter in module.parameters()):
        return  # a rehearsal, which knows no values
    with evaluating(module):
        _compare(module, layers, samples, "")
    with training(module):
        if not is_random(module, samples[0]):
            _compare(module, layers, samples, " in training")
            _compare_gradients(module, layers, samples[0])


def _compare(module: nn.Module, layers: Sequence[PipelineLayer], samples: Sequence[Any], when: str) -> None:
    with torch.no_grad():
        with restored(module):
            expected = [find_output(call(module, map_tensors(torch.clone, sample))) for sample in samples]
        runs = [layer.run for layer in layers]
        assert isinstance(runs[0], Part)
        values: list[Any] = [tuple(runs[0].trace.inputs.of(map_tensors(torch.clone, one))[1]) for one in samples]
        for run in runs:
            assert isinstance(run, Part)
            with restored(module):
                values = [replace(run, fills_with=float("nan"), shares_draws=False)(value) for value in values]
    counts = [[len(list_tensors(one)) for one in outputs] for outputs in (values, expected)]
    if counts[0] != counts[1]:
        raise SettingsError(
            f"a model run as a pipeline must return its own results, but {type(module).__name__} returns "
            f"{counts[1][0]} tensors, of which the last stage has {counts[0][0]}: hooks collect the others from blocks "
            "of other stages; do without them (output_hidden_states and the like of transformers), or set "
            "Layout(pipeline=1) (--layout.pipeline 1)"
        )
    pairs = [pair for made, whole in zip(values, expected, strict=True) for pair in pair_up(made, whole)]
    for value, whole in pairs:
        difference = (value - whole).abs().max() if value.shape == whole.shape else torch.tensor(torch.inf)
        if not difference <= _TOLERANCE * whole.abs().max().clamp(min=1e-6):
            raise SettingsError(
                f"a model run as a pipeline must compute the same as the whole one, but {type(module).__name__}, cut "
                f"at {', '.join(layer.name for layer in layers[1:])}, differs by {float(difference):.3g} in its output"
                f"{when}: its blocks share something that is no argument of theirs, or its forward changes something "
                f"after its first blocks that the next one uses; {LAYERS_ADVICE}"
            )


def _compare_gradients(module: nn.Module, layers: Sequence[PipelineLayer], sample: Any) -> None:
    parts = [layer.run for layer in layers if isinstance(layer.run, Part)]
    inputs = tuple(parts[0].trace.inputs.of(map_tensors(torch.clone, sample))[1])

    def run_whole() -> Any:
        with restored(module, on_copies=True):
            return find_output(call(module, map_tensors(torch.clone, sample)))

    def run_part(part: Part, value: Any) -> Any:
        with restored(module, on_copies=True):
            return replace(part, fills_with=float("nan"), shares_draws=False)(value)

    with without_constants(module):
        found = find_wrong_gradient(module, run_whole, [partial(run_part, part) for part in parts], inputs)
    if found:
        raise SettingsError(
            f"a model run as a pipeline must have the gradients of the whole one, but {type(module).__name__}, cut at "
            f"{', '.join(layer.name for layer in layers[1:])}, has {found}: a hook on a result that several stages use "
            f"sees a part of its gradient on each, for instance; {LAYERS_ADVICE}"
        )
