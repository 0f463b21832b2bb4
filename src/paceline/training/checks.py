"""What a replica refuses, and in which words."""

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.errors import GradientError, SettingsError
from paceline.optim.torch_rules import BY_ELEMENT, updates_by_element
from paceline.parallel.part import Part
from paceline.parallel.zero_redundancy import own_part
from paceline.sync.rule import Rule
from paceline.topology.layout import Layout

Precision = Literal["fp32", "bf16", "fp16"]
Landing = Literal["update", "arrival", "next_forward"]
"""When a bucket's gradients reach the optimizer: with all others, as it arrives, or when the next forward needs it."""


def check_replica(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    part: Part,
    rule: Rule,
    precision: Precision,
    landing: Landing,
    clip_norm: float | None,
) -> None:
    """Refuse what a replica cannot train, or not in that way."""
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    check_settings(precision, clip_norm, parameters)
    check_placement(parameters, part.group)
    check_optimizer(optimizer, module)
    check_rule_fits(rule, landing)
    check_layout(part.layout, rule, landing)
    if rule.carries_momentum:
        check_momentum(own_part(optimizer))
    if landing != "update":
        check_lands_by_bucket(optimizer, precision, clip_norm)


def check_settings(precision: str, clip_norm: float | None, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse settings that cannot work."""
    if precision not in get_args(Precision):
        raise SettingsError(f"precision must be one of {get_args(Precision)}, but got {precision!r}")
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise SettingsError(f"clip_norm must be more than 0, but got {clip_norm}; None clips nothing")
    if not parameters:
        raise SettingsError("the module must have parameters that require gradients, but it has none")


def check_placement(parameters: Mapping[str, nn.Parameter], group: Group) -> None:
    """Refuse parameters that are elsewhere than the group."""
    for name, parameter in parameters.items():
        if parameter.device.type != group.device.type:
            raise SettingsError(
                f"the module must be on its group's device {group.device}, but {name} is on "
                f"{parameter.device}; call module.to(group.device) before building the optimizer"
            )


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer of parameters that are not the module's."""
    known = {id(parameter) for parameter in module.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in held)
    if strangers:
        raise SettingsError(
            f"the optimizer must hold parameters of the module only, but {strangers} of its {len(held)} are not; "
            "build it from module.parameters() after the module is complete"
        )


def check_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would add momentum to what has it already."""
    if not isinstance(optimizer, torch.optim.SGD) or any(group["momentum"] for group in optimizer.param_groups):
        raise SettingsError(
            f"the optimizer must be SGD without momentum where the codec carries it, but got {type(optimizer).__name__}"
            "; take --optimizer sgd --optimizer.momentum 0, or a codec without momentum"
        )


def check_lands_by_bucket(optimizer: torch.optim.Optimizer, precision: str, clip_norm: float | None) -> None:
    """Refuse what must see the whole step's gradients before any parameter changes."""
    reason = ""
    if clip_norm is not None:
        reason = "clip_norm needs the norm of all gradients; set it to none"
    elif precision == "fp16":
        reason = "fp16 must know of an overflow anywhere before it steps; take bf16 or fp32"
    elif not updates_by_element(optimizer):
        known = ", ".join(kind.__name__ for kind in BY_ELEMENT)
        reason = f"{type(optimizer).__name__} may need the whole step at once; take one of {known}"
    if reason:
        raise SettingsError(f"landing bucket by bucket must not need the whole step's gradients, but {reason}")


def check_rule_fits(rule: Rule, landing: Landing) -> None:
    """Refuse what does not go together with a rule that does more than to sum gradients."""
    if landing != "update" and not rule.keeps_replicas_equal:
        raise SettingsError(f"landing must be update with sync {rule.name}, but got {landing}; leave it out")


def check_layout(layout: Layout, rule: Rule, landing: Landing) -> None:
    """Refuse what cannot be right where ranks share a model."""
    if layout.is_plain:
        return
    reason = ""
    if landing != "update":
        reason = f"landing {landing}; leave it out"
    elif rule.is_asynchronous or not rule.runs_optimizer or rule.num_server_processes or rule.reads_gradients:
        reason = f"sync {rule.name}; take every_step, or a rule of the local family such as diloco"
    elif not rule.keeps_replicas_equal and (layout.context > 1 or layout.shares_optimizer):
        axis = "context" if layout.context > 1 else "sharded with zero_stage 1"
        reason = f"sync {rule.name} along {axis}, whose ranks must sum every gradient; take every_step"
    if reason:
        raise SettingsError(f"the layout must go with the other settings, but got {reason}")


def check_backward(loss: Tensor, weight: float, is_exchanging: bool, frozen: Mapping[str, nn.Parameter]) -> None:
    """Refuse a backward that would be counted wrongly."""
    if is_exchanging:
        raise GradientError("update() must be called after backward(last=True), but backward was called again")
    if loss.dim() != 0:
        raise GradientError(f"loss must be 0-dim, but got shape {tuple(loss.shape)}; take its mean or sum first")
    if not 0 <= weight < math.inf:
        raise GradientError(f"weight must be a number of at least 0, but got {weight}")
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise GradientError(
                f"{name} must stay frozen, but requires_grad was set after the replica was made, so that its "
                "gradient would not be exchanged; unfreeze first, then make a new Replica"
            )
