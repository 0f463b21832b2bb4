"""Optimizers that have seen different gradients become equal again: their states become the workers' mean."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group


def average_states(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], group: Group) -> None:
    """Replace the state of each parameter by the mean over all workers, the same bits on each; all workers call it.

    What cannot be averaged is that of the first worker that has it: counts of steps, and states in integers, as those
    of 8-bit optimizers, with all that belongs to them.

    Args:
        optimizer: Optimizer of this worker.
        parameters: Parameters that are trained, by name.
        group: The workers.
    """
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    everybody = group.gather_documents(
        {name: _describe(state) for name, state in states.items() if state}, name="states"
    )
    for name, parameter in parameters.items():
        holders = [rank for rank, theirs in enumerate(everybody) if name in theirs]
        if not holders:
            continue
        kinds = everybody[holders[0]][name]
        is_mean = not any(kind["tensor"] and kind["shape"] and not _is_float(kind) for kind in kinds.values())
        state = optimizer.state[parameter]
        for key, kind in kinds.items():
            where = f"optimizer state {key} of {name}"
            if not kind["tensor"]:
                state[key] = kind["value"]
                continue
            dtype = getattr(torch, kind["dtype"])
            held = state.get(key)
            if not isinstance(held, Tensor):
                held = torch.zeros(kind["shape"], dtype=dtype, device=parameter.device if kind["shape"] else "cpu")
            sent = held.to(group.device, copy=True).contiguous()
            if kind["shape"] and is_mean:
                group.all_reduce(sent, name=where).wait()
                sent /= len(holders)
            else:
                group.broadcast(sent, source=holders[0], name=where).wait()
            held.copy_(sent)
            state[key] = held


def _describe(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return of each item of a state what makes one like it, as JSON."""
    return {
        key: {"tensor": True, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Tensor)
        else {"tensor": False, "value": value}
        for key, value in state.items()
    }


def _is_float(kind: Mapping[str, Any]) -> bool:
    dtype: torch.dtype = getattr(torch, kind["dtype"])
    return dtype.is_floating_point
