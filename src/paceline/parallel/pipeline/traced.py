"""A model whose forward is no plain sequence, cut where it calls its blocks: each rank runs that forward in part.

The forward of the model itself runs on every rank, on the calls that are its own; all other calls return what the
rank before has sent, or, where only shapes matter, an empty tensor. It stops before the first call of the next rank. So
masks, positions and whatever else is computed between calls is as in the whole model, for any inputs.
"""

from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paceline.data.batch import call, describe, list_tensors, map_tensors
from paceline.errors import PacelineError, SettingsError
from paceline.parallel.mesh import Mesh
from paceline.parallel.pipeline.forward_part import Part
from paceline.parallel.pipeline.gradient_check import find_wrong_gradient, pair_up
from paceline.parallel.pipeline.layers import LAYERS_ADVICE, HasPipelineLayers, PipelineLayer, find_owned, list_layers
from paceline.parallel.pipeline.trace import ForwardTrace, find_output, own_used, record
from paceline.parallel.trial import evaluating, is_random, restored, training, vary, without_constants

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


def _make_layers(module: nn.Module, trace: ForwardTrace) -> list[PipelineLayer]:
    """Return a layer for each call of a block, and one for the calls before them; others are of the block before."""
    lists = {name for name in trace.opened if isinstance(module.get_submodule(name), _LISTS)}
    blocks = [i for i, made in enumerate(trace.calls) if made.name.rpartition(".")[0] in lists]
    if not blocks:  # no lists: a layer for each call that has something to learn
        blocks = [
            i for i, made in enumerate(trace.calls) if any(True for _ in module.get_submodule(made.name).parameters())
        ]
    after = blocks[-1] + 1 if blocks else 0
    begins = {0, *blocks, *([after] if after < len(trace.calls) else [])}
    begins -= {i for i, made in enumerate(trace.calls) if made.is_joined}
    layers: list[PipelineLayer] = []
    for begin, end in pairwise([*sorted(begins), len(trace.calls)]):
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
