"""Hooks on the gradients of parameters: kept where a layout makes other parameters of a model's, or refused by name."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paceline.errors import SettingsError
from paceline.parallel.local import list_gathered, local, wrap
from paceline.topology.layout import Layout

Hook = Callable[[Tensor], Tensor | None]

_TOLERANCE = 32
"""Largest difference between a hook's result of a sum and the sum of its results, in roundings of the largest."""
ADVICE = (
    "do it in a pre-hook of the optimizer (register_step_pre_hook), which gets sums over ranks, clipped if they are, "
    "or freeze with requires_grad_(False) what must not move"
)


def list_hooks(parameter: Tensor) -> list[Hook]:
    """Return the hooks that `register_hook` has put on a parameter."""
    return list((parameter._backward_hooks or {}).values())


def check_hooks(module: nn.Module, layout: Layout) -> None:
    """Raise `SettingsError` if hooks on gradients of parameters would not do what they do in one process.

    Where ranks share parameters, or run micro-batches one after the other, a hook gets a part of the sum of gradients.
    It is right for that if it is linear: a factor, a mask of rows. Each is tried on three gradients.
    """
    if not layout.shards_parameters and layout.pipeline == layout.tensor == layout.expert == 1:
        return
    where = f"pipeline({layout.pipeline})" if layout.pipeline > 1 else f"expert({layout.expert})"
    if layout.tensor > 1 or layout.shards_parameters:
        where = f"tensor({layout.tensor})" if layout.tensor > 1 else f"sharded({layout.sharded}) with zero_stage 2 or 3"
    for name, parameter in module.named_parameters():
        hooks, rule = list_hooks(parameter), ""
        if hooks and layout.tensor > 1:
            raise SettingsError(
                f"a parameter must have no hooks on its gradient for {where}, whose ranks have parts of it, but {name} "
                f"has; {ADVICE}"
            )
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            rule = "be those of register_hook"
        elif parameter.requires_grad and not all(_is_linear(hook, parameter) for hook in hooks):
            rule = "be linear (a factor, a mask of rows)"
        if rule:
            raise SettingsError(
                f"hooks on a parameter's gradient must {rule} for {where}, where they see a part of it, but those of "
                f"{name} are not; {ADVICE}"
            )


def warn_of_hooks(module: nn.Module, layout: Layout) -> None:
    """Warn of hooks on gradients of parameters that see those of a rank's own samples, which others are added to.

    Whether one is linear, so that this makes no difference, could be found by running it only, and it may count or
    record what it sees. Where `check_hooks` has tried all of them there is nothing to say. Hooks of Paceline's own,
    which a replica that was not closed has left, are none of these.
    """
    if layout.shards_parameters or max(layout.pipeline, layout.tensor, layout.expert) > 1:
        return
    hooked = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
        and any(
            not getattr(hook, "__module__", "").startswith("paceline.")
            for hook in (
                *list_hooks(parameter),
                *(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values(),
            )
        )
    ]
    if hooked:
        names = hooked[0] if len(hooked) == 1 else f"{hooked[0]} (and {len(hooked) - 1} more parameters)"
        warnings.warn(
            f"hooks on the gradient of {names} see that of each worker's own samples, before gradients are summed, as "
            f"in DistributedDataParallel. Factors and masks come out as in one process, clipping does not: {ADVICE}. "
            "If they are right so, silence this by warnings.filterwarnings('ignore', 'hooks on the gradient')",
            stacklevel=4,
        )


def keep_hooks(parameters: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Let hooks run on the DTensors, of which every rank has all, that have taken their parameters' place.

    Args:
        parameters: Parameters with the DTensors.
    """
    for before, parameter in parameters:
        for hook in list_hooks(before):

            def run(gradient: Tensor, hook: Hook = hook) -> Tensor:
                return wrap(gradient, _run(hook, local(gradient)))

            parameter.register_hook(run)


def carry_hooks(blocks: Sequence[nn.Module], hooks: Sequence[tuple[nn.Module, str, list[Hook]]]) -> None:
    """Let hooks run on the gathered parameters of sharded modules, before gradients are summed over ranks.

    Args:
        blocks: Modules that gather their parameters.
        hooks: Modules, their parameters' names and their hooks, as `find_hooks` has found them before.
    """
    missing = {id(module._parameters[name]): (name, held) for module, name, held in hooks}

    def carry(module: nn.Module, inputs: Any) -> None:
        for parameter in list_gathered(module) if missing else ():  # torch makes it in the first forward, and keeps it
            found = missing.pop(id(parameter.sharded_param), None)
            for hook in found[1] if found is not None and parameter.unsharded_param.requires_grad else ():
                parameter.unsharded_param.register_hook(hook)

    for block in blocks if hooks else ():
        block.register_forward_pre_hook(carry)


def find_hooks(module: nn.Module) -> list[tuple[nn.Module, str, list[Hook]]]:
    """Return the modules and names of parameters with hooks, and these."""
    return [
        (part, name, list_hooks(parameter))
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and list_hooks(parameter)
    ]


def _is_linear(hook: Hook, parameter: Tensor) -> bool:
    """Return whether a hook maps sums of gradients to the sums of what it maps them to, and multiples to multiples."""
    held = local(parameter)
    if held.is_meta or isinstance(held, FakeTensor):
        return True  # a rehearsal, which knows no values
    generator = torch.Generator().manual_seed(0)
    some, others = (torch.randn(parameter.shape, generator=generator).to(held) for _ in range(2))
    devices = [held.device] if held.is_cuda else []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            of_some, of_others, of_both = (_run(hook, one) for one in (some, others, 3 * some + 1e3 * others))
    except Exception:  # such as one that needs more than a gradient
        return False
    expected = 3 * of_some + 1e3 * of_others
    scale = torch.maximum(of_both.abs().max(), expected.abs().max()) if expected.numel() else 0.0
    return bool(((of_both - expected).abs() <= _TOLERANCE * torch.finfo(held.dtype).eps * scale).all())


def _run(hook: Hook, gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    result = hook(gradient)
    return gradient if result is None else result
