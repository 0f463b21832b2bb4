"""The cost of each layer of a model, estimated or measured, and the stages that balance it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import SettingsError
from paceline.parallel.mesh import Mesh
from paceline.parallel.pipeline.layers import PipelineLayer, find_owned
from paceline.parallel.pipeline.settings import PipelineSettings
from paceline.topology.partition import partition

_NUM_REPEATS = 3


def cut(
    model: nn.Module,
    layers: Sequence[PipelineLayer],
    settings: PipelineSettings,
    mesh: Mesh,
    sample: tuple[Tensor, ...],
) -> list[range]:
    """Return the layers of each stage; every rank of the world calls it, and they all get the same.

    Args:
        model: The whole model.
        layers: Layers of the model.
        settings: Settings that say where stages begin, or how to balance them.
        mesh: Mesh of the layout.
        sample: Inputs of the first layer, for about one micro-batch.

    Raises:
        SettingsError: There are too few layers, or `cuts` names an unknown one.
    """
    num_stages = settings.count_stages(mesh.size("pipeline"), len(layers))
    if isinstance(settings.cuts, tuple):
        return cut_at(settings.cuts, [layer.name for layer in layers])
    with undisturbed(model):
        if settings.cuts == "estimated":
            return partition(estimate(model, layers, sample), num_stages)
        measured = mesh.world.gather_documents(measure(model, layers, sample), name="costs of pipeline stages")
    return partition([median(one) for one in zip(*measured, strict=True)], num_stages)


def estimate(model: nn.Module, layers: Sequence[PipelineLayer], sample: tuple[Tensor, ...]) -> list[float]:
    """Return each layer's flops of one forward, or, if all are 0, its number of parameters."""
    flops: list[float] = []
    value: Any = sample if len(sample) > 1 else sample[0]
    with torch.no_grad():
        for layer in layers:
            with FlopCounterMode(display=False) as counter:
                value = layer.run(value)
            flops.append(float(counter.get_total_flops()))
    if any(flops):
        return flops
    return [float(sum(tensor.numel() for tensor in find_owned(model, [layer]))) for layer in layers]


def measure(model: nn.Module, layers: Sequence[PipelineLayer], sample: tuple[Tensor, ...]) -> list[float]:
    """Return each layer's seconds of one forward and backward, as medians."""
    if sample[0].is_meta or any(parameter.is_meta for parameter in model.parameters()):
        raise SettingsError(
            "a model must have values to be measured, but it is on the meta device; take cuts estimated"
        )
    costs_s = []
    value: Any = sample if len(sample) > 1 else sample[0]
    for layer in layers:
        weights = [one for one in find_owned(model, [layer]) if one.requires_grad]
        times_s = []
        for _ in range(1 + _NUM_REPEATS):
            began_s = _now(sample[0].device)
            output = _run_once(layer, value, weights)
            times_s.append(_now(sample[0].device) - began_s)
        costs_s.append(median(times_s[1:]))
        value = output
    return costs_s


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Restore buffers and the random state afterwards: the code inside is a trial."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _run_once(layer: PipelineLayer, value: Any, weights: list[Tensor]) -> Any:
    """Run a layer forward and backward separately, and return its output; no `grad` changes."""
    given = value if isinstance(value, tuple) else (value,)
    inputs = tuple(one.detach().requires_grad_(one.is_floating_point()) for one in given)
    output = layer.run(inputs if isinstance(value, tuple) else inputs[0])
    outputs = [one for one in (output if isinstance(output, tuple) else (output,)) if one.requires_grad]
    sources = [*weights, *(one for one in inputs if one.requires_grad)]
    if outputs and sources:
        torch.autograd.grad(outputs, sources, [torch.ones_like(one) for one in outputs], allow_unused=True)
    return tuple(one.detach() for one in output) if isinstance(output, tuple) else output.detach()


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def cut_at(names: Sequence[str], known: Sequence[str]) -> list[range]:
    """Return the indices of each stage's layers in `known`, where each stage but the first begins at a name.

    Raises:
        SettingsError: A name is unknown, or the order is wrong.
    """
    for name in names:
        if name not in known[1:]:
            raise SettingsError(
                f"cuts must name layers of the model at which a stage can begin, but got {name!r}; they are: "
                f"{', '.join(known[1:])}"
            )
    begins = [0, *(known.index(name) for name in names), len(known)]
    if begins != sorted(set(begins)):
        raise SettingsError(
            f"cuts must be in the order of the layers without repeats, but got {', '.join(names)}; the layers are: "
            f"{', '.join(known)}"
        )
    return [range(begin, end) for begin, end in pairwise(begins)]
