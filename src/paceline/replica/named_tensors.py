"""A model's tensors and its optimizer's, by the names they have in checkpoints, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters (a tied one once) and persistent buffers, by name."""
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return {name: parameter.detach() for name, parameter in module.named_parameters()} | buffers


def optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the optimizer's tensors, and what else it keeps of each parameter."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    names = _names_by_index(module, optimizer)
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{names[index]}/{key}"] = value
            else:
                scalars.setdefault(names[index], {})[key] = value
    return tensors, scalars


def _names_by_index(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the name of the optimizer's i-th parameter at place i."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def load_optimizer(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Mapping[str, Any]],
) -> None:
    """Load the state of the parameters that are here; hyper-parameters stay those of the run's settings."""
    by_parameter: dict[str, dict[str, Any]] = {name: dict(state) for name, state in scalars.items()}
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
            by_parameter.setdefault(parameter, {})[key] = tensor
    indices = {name: index for index, name in enumerate(_names_by_index(module, optimizer))}
    state = {indices[name]: values for name, values in by_parameter.items() if name in indices}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
