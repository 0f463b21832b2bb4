"""The cost of each layer of a model, estimated or measured, and the stages that balance it."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from statistics import median
from typing import Any, Self

import torch
from torch import Size, Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from torch.utils.module_tracker import ModuleTracker

from paceline.data.batch import list_tensors, map_tensors
from paceline.errors import SettingsError
from paceline.parallel.mesh import Mesh
from paceline.parallel.pipeline.layers import PipelineLayer, find_owned
from paceline.parallel.pipeline.settings import PipelineSettings
from paceline.parallel.trial import restored
from paceline.topology.partition import partition

_NUM_REPEATS = 3
_FLOPS_OF_BYTE = 4.0
"""Flops in the time in which a byte moves. Cores do 3 to 10; accelerators more, but their kernels fuse."""


class _ByteCounter(TorchDispatchMode):
    """Counts the bytes of all tensors that operations read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.is_view:
            moved = tree_leaves((args, kwargs, output))
            self.num_bytes += sum(one.numel() * one.element_size() for one in moved if isinstance(one, Tensor))
        return output


class _OneModule(ModuleTracker):
    """Tracker of modules that tells none apart; torch's fails on modules that get views of parameters."""

    def __enter__(self) -> Self:
        """Hook nothing."""
        return self

    def __exit__(self, *error: object) -> None:
        """Unhook nothing."""


def _mkldnn_rnn_flops(input: Size, *weights_and_state: Any, **_: Any) -> int:
    """Return the flops of one direction of an RNN's layer on CPUs, whose matrices are its first two weights."""
    return _rnn_flops(input, weights_and_state[:2])


def _cudnn_rnn_flops(input: Size, weights: Sequence[Size], *_: Any, **__: Any) -> int:
    """Return the flops of a whole RNN on a GPU."""
    return _rnn_flops(input, weights)


def _rnn_flops(input: Size, weights: Sequence[Size]) -> int:
    return 2 * prod(input[:-1]) * sum(prod(weight) for weight in weights if len(weight) > 1)


def _cpu_attention_flops(query: Size, key: Size, value: Size, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.mkldnn_rnn_layer: _mkldnn_rnn_flops,
    torch.ops.aten._cudnn_rnn: _cudnn_rnn_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention_flops,
}
"""Flops of kernels that torch's counter has no formula for: of a whole recurrence, and of attention on CPUs."""


def cut(
    model: nn.Module,
    layers: Sequence[PipelineLayer],
    settings: PipelineSettings,
    mesh: Mesh,
    sample: tuple[Tensor, ...],
    num_samples: int = 1,
) -> list[range]:
    """Return the layers of each stage; every rank of the world calls it, and they all get the same.

    Args:
        model: The whole model.
        layers: Layers of the model.
        settings: Settings that say where stages begin, or how to balance them.
        mesh: Mesh of the layout.
        sample: Inputs of the first layer.
        num_samples: Samples of a micro-batch. If `sample` has fewer, they are repeated: kernels of many samples take
            other shares of the time than those of one.

    Raises:
        SettingsError: There are too few layers, `cuts` names an unknown one, or there is no sample to measure with.
    """
    num_stages = settings.count_stages(mesh.size("pipeline"), len(layers))
    if isinstance(settings.cuts, tuple):
        return cut_at(settings.cuts, [layer.name for layer in layers])
    if len(sample) == 0:
        raise SettingsError(
            "sample must be inputs of a sample for a pipeline, unless its cuts are named, but got none; "
            "give parallelize one"
        )
    sample = _repeat(sample, num_samples)
    with restored(model):
        if settings.cuts == "estimated":
            return partition(estimate(model, layers, sample), num_stages)
        measured = mesh.world.gather_documents(measure(model, layers, sample), name="costs of pipeline stages")
    return partition([median(one) for one in zip(*measured, strict=True)], num_stages)


def _repeat(sample: tuple[Tensor, ...], num_samples: int) -> tuple[Tensor, ...]:
    number = len(sample[0])
    if number >= num_samples:
        return sample
    times = -(-num_samples // number)
    return tuple(torch.cat([one] * times)[:num_samples] if one.dim() and len(one) == number else one for one in sample)


def estimate(model: nn.Module, layers: Sequence[PipelineLayer], sample: tuple[Tensor, ...]) -> list[float]:
    """Return each layer's cost of one forward in flops, where moving a byte counts as some flops.

    Flops alone make what only moves memory (norms, activations, embeddings, kernels that no formula is known of) free.
    """
    costs: list[float] = []
    value: Any = sample if len(sample) > 1 else sample[0]
    with torch.no_grad():
        for layer in layers:
            counter = FlopCounterMode(display=False, custom_mapping=FLOPS)
            counter.mod_tracker = _OneModule()
            with counter as flops, _ByteCounter() as moved:
                value = layer.run(value)
            costs.append(flops.get_total_flops() + _FLOPS_OF_BYTE * moved.num_bytes)
    return costs


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


def _run_once(layer: PipelineLayer, value: Any, weights: list[Tensor]) -> Any:
    """Run a layer forward and backward separately, and return its output; no `grad` changes."""
    given = value if isinstance(value, tuple) else (value,)
    inputs = tuple(one.detach().requires_grad_(one.is_floating_point()) for one in given)
    output = layer.run(inputs if isinstance(value, tuple) else inputs[0])
    outputs = [one for one in list_tensors(output) if one.requires_grad]
    sources = [*weights, *(one for one in inputs if one.requires_grad)]
    if outputs and sources:
        torch.autograd.grad(outputs, sources, [torch.ones_like(one) for one in outputs], allow_unused=True)
    return map_tensors(torch.Tensor.detach, output)


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
