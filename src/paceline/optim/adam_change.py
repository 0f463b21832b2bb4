"""The change that Adam would make to parameters, without making it."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_UNUSUAL = ("amsgrad", "maximize", "capturable", "differentiable")


def replace_by_changes(
    optimizer: torch.optim.Optimizer, gradients: Mapping[nn.Parameter, Tensor], scale: float = 1.0, factor: float = 1.0
) -> bool:
    """Replace gradients by what torch's Adam or AdamW would subtract, in one pass that leaves parameters alone.

    Up to rounding it is what a step does: moments and the count of steps are changed. Hooks are not run.

    Args:
        optimizer: Optimizer whose groups hold the parameters.
        gradients: Gradient of each parameter that it holds, and of others, whose change is 0.
        scale: Factor by which gradients are multiplied first.
        factor: Factor by which changes are multiplied.

    Returns:
        Whether it was done: only where the kernel suits, and moments exist; the first step is left to the optimizer.
    """
    groups = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if not _is_plain(optimizer) or not all(_suits(optimizer.state.get(p, {}), p, gradients[p]) for _, p in groups):
        return False
    from paceline.optim.numba_adam import replace  # numba takes long to import

    for parameter in gradients.keys() - {parameter for _, parameter in groups}:
        gradients[parameter].zero_()
    for group, parameter in groups:
        state = optimizer.state[parameter]
        state["step"] += 1
        gradient, weights, first, second = (
            each.as_strided((parameter.numel(),), (1,))
            for each in (gradients[parameter], parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
        )
        replace(gradient, weights, first, second, (scale, *_numbers(group, float(state["step"])), factor))
    return True


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether steps are those of torch's Adam or AdamW: not if somebody wrapped them, but for its schedulers."""
    wrapper = vars(optimizer).get("step")
    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and (wrapper is None or getattr(wrapper, "__wrapped__", None) is type(optimizer).step)
        and not any(group[option] for group in optimizer.param_groups for option in _UNUSUAL)
        and importlib.util.find_spec("numba") is not None
    )


def _suits(state: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> bool:
    """Return whether all are float32 on the CPU, with the same elements in the same places."""
    if "exp_avg" not in state:
        return False
    tensors = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
    return all(
        each.dtype == torch.float32 and each.device.type == "cpu" and each.stride() == gradient.stride()
        for each in tensors
    )


def _numbers(group: Mapping[str, Any], step: float) -> tuple[float, ...]:
    beta1, beta2 = map(float, group["betas"])
    rate, decay = float(group["lr"]), group["weight_decay"]
    correction = (1 - beta2**step) ** 0.5
    coupled, decoupled = (0.0, rate * decay) if group["decoupled_weight_decay"] else (decay, 0.0)
    moments = (1 - beta1, beta2, 1 - beta2)
    return *moments, rate / (1 - beta1**step) * correction, group["eps"] * correction, coupled, decoupled
