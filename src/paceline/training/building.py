"""The model of a run, built whole on every rank or, where a layout shares it, without memory until it is cut."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.comm.group import Group
from paceline.data import Batch, Interval, Splits
from paceline.data.batch import describe, list_tensors
from paceline.data.datasets import SEEDING
from paceline.errors import SettingsError
from paceline.parallel.deferred import Construction, UndeferrableError, defer
from paceline.parallel.parallelize import needs_values
from paceline.parallel.pipeline.costs import estimate
from paceline.parallel.pipeline.layers import list_layers
from paceline.training.model import Model
from paceline.training.run import Run

_MEASURED = "pipeline.cuts measured runs its layers"
"""Reason for which a model is not built without memory first."""


def build_model(run: Run, splits: Splits, group: Group, model: Model | None = None) -> nn.Module:
    """Return the model, the same on every process; `model` replaces the run's own if that has grown."""
    with SEEDING:
        torch.manual_seed(run.seed)
        return (model or run.model).build(splits.train.spec).to(group.device)


def build_shared(run: Run, splits: Splits, group: Group, model: Model) -> tuple[nn.Module, Construction | None, str]:
    """Return the model, without memory if ranks of the run's layout share its parameters and it allows that.

    Returns:
        The model; its construction if it has no memory yet; and why that is not so, if a layout shares it.
    """
    layout = run.layout
    is_shared = layout.pipeline > 1 or layout.shards_parameters
    if layout.tensor > 1 or not is_shared:  # a tensor axis is compared with the whole model
        return build_model(run, splits, group, model), None, ""
    module, construction, reason = _try_to_defer(run, splits, group, model)
    said = group.gather_documents([construction.digest if construction is not None else "", reason], name="model")
    reason = next((theirs for _, theirs in said if theirs), "")
    if not reason and any(digest != said[0][0] for digest, _ in said):
        reason = "ranks construct different ones, of which rank 0's is taken"
    if reason or module is None:
        about = f"every rank builds the whole model before it keeps its part, since {reason}"
        if reason != _MEASURED:
            about += (
                "; it was built a second time for that, so that what its construction draws elsewhere than from "
                "torch's generator, such as from NumPy's, differs from that of one process; seed it where "
                "the construction begins"
            )
        return build_model(run, splits, group, model), None, about
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta:
            tensor.data = tensor.data.to(group.device)
    return module, construction, ""


def read_sample(run: Run, splits: Splits, device: torch.device) -> Any:
    """Return the model's inputs for one sample, as the run's loss gives them to it."""
    return run.loss.inputs_of(Batch(splits.train.read_first(), 1, Interval(0, 1)).to(device))


def check_inputs(run: Run, module: nn.Module, inputs: Any) -> None:
    """Raise `SettingsError` if a model that the run's layout tries before training cannot be called with its inputs."""
    if not needs_values(module, run.layout, run.pipeline):
        return
    by_name = dict(inputs) if isinstance(inputs, Mapping) else {}
    by_place = [] if by_name else inputs if isinstance(inputs, tuple | list) else [inputs]
    try:
        inspect.signature(module.forward).bind(*by_place, **by_name)
    except TypeError as error:
        raise SettingsError(
            f"a model must take the inputs of a sample, but forward of {type(module).__name__} {error}, and the inputs "
            f"are {describe(inputs)}; name them in the data set, or a collate_fn, as forward names its arguments"
        ) from error


def _try_to_defer(
    run: Run, splits: Splits, group: Group, model: Model
) -> tuple[nn.Module | None, Construction | None, str]:
    """Return the model and its construction, or why there is none."""
    if run.layout.pipeline > 1 and run.pipeline.cuts == "measured":
        return None, None, _MEASURED
    try:
        with SEEDING:
            torch.manual_seed(run.seed)
            module, construction = defer(lambda: model.build(splits.train.spec))
        if needs_values(module, run.layout, run.pipeline):
            raise UndeferrableError("it is run to find how it can be split")
        if run.layout.pipeline > 1 and run.pipeline.cuts == "estimated":
            _check_layers(run, module, splits)
    except UndeferrableError as error:
        return None, None, str(error)
    return module, construction, ""


def _check_layers(run: Run, module: nn.Module, splits: Splits) -> None:
    """Raise `UndeferrableError` if layers whose costs a pipeline estimates do not run without contents."""
    sample = tuple(tensor.to("meta") for tensor in list_tensors(read_sample(run, splits, torch.device("cpu"))))
    try:
        estimate(module, list_layers(module, run.pipeline.sequence), sample)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UndeferrableError(f"its layers need values to be run: {type(error).__name__}: {first_line}") from error
