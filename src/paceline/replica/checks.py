"""Checks of a replica's arguments, and their errors."""

import inspect
import math
import warnings
from collections.abc import Container, Mapping
from itertools import compress
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.errors import GradientError, NonFiniteError, SettingsError
from paceline.parallel.batch_norm import BatchNormScope, check_batch_norm
from paceline.parallel.model_shard import ModelShard
from paceline.parallel.parameter_changes import WholeParameter
from paceline.parallel.parameter_hooks import warn_of_hooks
from paceline.parallel.pipeline.absent import find_missing
from paceline.parallel.zero_redundancy import local_optimizer
from paceline.registry import check_whole, validate
from paceline.replica.landing import Landing, check_landing
from paceline.replica.step_scalars import is_number
from paceline.sync import EveryStep
from paceline.sync.rule import Rule
from paceline.topology.layout import Layout

Precision = Literal["fp32", "bf16", "fp16"]


def find_original(module: nn.Module) -> nn.Module:
    """Return the module inside a `torch.compile` wrapper, whose names are saved; any other module itself.

    Raises:
        SettingsError: The argument is no module, or one whose gradients torch already exchanges.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise SettingsError(
            f"the module must be the model itself, whose gradients the replica exchanges, but got it wrapped in "
            f"{type(module).__name__}; give Replica the module inside"
        )
    if not isinstance(module, nn.Module):
        raise SettingsError(f"the module must be a torch.nn.Module, but got a {type(module).__name__}; pass the model")
    original = getattr(module, "_orig_mod", module)
    return original if isinstance(original, nn.Module) else module


def check_kind(optimizer: object) -> None:
    """Refuse what is no optimizer, or one that needs more than a step's gradients."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingsError(
            f"optimizer must be a torch.optim.Optimizer of the module's parameters, but got {optimizer!r}; make one"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise SettingsError(
            f"the optimizer must take its step from the gradients alone, but {type(optimizer).__name__} computes the "
            "loss again inside its step, each worker its own; take another, such as AdamW"
        )


def read_rule(sync: Rule | str) -> Rule:
    """Return a rule that is given as one, or by its name.

    Raises:
        SettingsError: The value is neither.
    """
    return validate(Rule.model_validate, sync, "sync")


def check_replica(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    shard: ModelShard,
    rule: Rule,
    precision: Precision,
    landing: Landing,
    clip_norm: float | None,
    ema: float | None,
    batch_norm: BatchNormScope,
) -> None:
    """Refuse arguments with which a replica cannot train."""
    check_kind(optimizer)
    is_compiled, module = module is not find_original(module), find_original(module)
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    check_settings(precision, landing, batch_norm, parameters)
    check_placement(parameters, shard.group)
    check_optimizer(optimizer, module)
    check_layout(shard.layout, rule)
    check_embeddings(module, shard, rule)
    if shard.group.size > 1 and rule.keeps_replicas_equal and shard.world.rank == 0:
        warn_of_hooks(module, shard.layout)
    check_landing(
        landing,
        precision=precision,
        clip_norm=clip_norm,
        rule=rule,
        layout=shard.layout,
        optimizer=optimizer,
        is_averaged=ema is not None,
        is_compiled=is_compiled,
    )
    check_batch_norm(batch_norm, rule, shard.layout)
    if rule.max_bandwidth is not None and shard.group.device.type != "cpu":
        raise SettingsError(
            f"max_bandwidth must be None for workers on {shard.group.device.type}, whose backend sends by itself, "
            f"but got {rule.max_bandwidth:g} bytes/s; leave it out"
        )
    is_one_host = len(shard.world.host_ranks) == shard.world.size > 1
    if rule.max_bandwidth is not None and is_one_host and shard.world.rank == 0:
        warnings.warn(
            "max_bandwidth limits nothing here: all workers are on one host and exchange through its memory",
            stacklevel=3,
        )
    if rule.carries_momentum:
        check_momentum(local_optimizer(optimizer))


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is none of the choices of a `Literal`."""
    if value not in get_args(choices):
        raise SettingsError(f"{name} must be one of {', '.join(get_args(choices))}, but got {value!r}")


def check_numbers(clip_norm: object, bucket_bytes: object, hash_interval: object, seed: object) -> None:
    """Refuse numbers that mean nothing."""
    if clip_norm is not None and not (is_number(clip_norm) and 0 < clip_norm < math.inf):
        raise SettingsError(f"clip_norm must be more than 0, but got {clip_norm!r}; None clips nothing")
    if bucket_bytes is not None:
        check_whole("bucket_bytes", bucket_bytes, 1, "leave it out for what suits the codec and the device")
    check_whole("hash_interval", hash_interval, 0, "0 compares nothing")
    check_whole("seed", seed)


def check_settings(precision: str, landing: str, batch_norm: str, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse settings that cannot work."""
    check_choice("precision", precision, Precision)
    check_choice("landing", landing, Landing)
    check_choice("batch_norm", batch_norm, BatchNormScope)
    if not parameters:
        raise SettingsError("the module must have parameters that require gradients, but it has none")


def check_placement(parameters: Mapping[str, nn.Parameter], group: Group) -> None:
    """Refuse parameters on another device than the group's."""
    for name, parameter in parameters.items():
        if parameter.device.type != group.device.type:
            raise SettingsError(
                f"the module must be on its group's device {group.device}, but {name} is on "
                f"{parameter.device}; call module.to(group.device) before building the optimizer"
            )


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer of parameters that are not the module's.

    What a rank has no values of, since another stage of a pipeline has them, leaves its group. In the place of what
    ``module.weight`` returns over a tensor axis, the parameter itself is taken.
    """
    known = {id(parameter) for parameter in module.parameters()}
    for group in optimizer.param_groups:
        is_here = [find_missing(parameter) is None for parameter in group["params"]]
        group["params"] = [_find_parameter(one, known) for one in compress(group["params"], is_here)]
        if "param_names" in group:
            group["param_names"] = list(compress(group["param_names"], is_here))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in held)
    if strangers:
        raise SettingsError(
            f"the optimizer must hold parameters of the module only, but {strangers} of its {len(held)} are not; "
            "build it from module.parameters() after the module is complete"
        )


def _find_parameter(given: Tensor, known: Container[int]) -> Tensor:
    """Return the parameter that a rank's view of it is of, or the tensor itself."""
    return given.parameter if isinstance(given, WholeParameter) and id(given.parameter) in known else given


def check_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would add momentum to gradients that have it already."""
    if not isinstance(optimizer, torch.optim.SGD) or any(group["momentum"] for group in optimizer.param_groups):
        raise SettingsError(
            f"the optimizer must be SGD without momentum where the codec carries it, but got {type(optimizer).__name__}"
            "; take SGD(momentum=0) (--optimizer sgd --optimizer.momentum 0), or a codec without momentum"
        )


def check_layout(layout: Layout, rule: Rule) -> None:
    """Refuse settings that would be wrong where ranks share a model."""
    if layout.is_plain:
        return
    reason = ""
    if rule.is_asynchronous or not rule.runs_optimizer or rule.num_server_processes or rule.reads_gradients:
        reason = f"sync {rule.name}; take every_step, or a rule of the local family such as diloco"
    elif not rule.keeps_replicas_equal and (layout.context > 1 or layout.shards_optimizer):
        axis = "context" if layout.context > 1 else "sharded with zero_stage 1"
        reason = f"sync {rule.name} along {axis}, whose ranks must sum every gradient; take every_step"
    if reason:
        raise SettingsError(f"the layout must go with the other settings, but got {reason}")


def check_embeddings(module: nn.Module, shard: ModelShard, rule: Rule) -> None:
    """Refuse embeddings that change their weights in forward, where ranks that look up other tokens must stay equal."""
    layout = shard.layout
    shares = layout.shards_parameters or layout.expert > 1
    if not shares and (shard.statistics_group.size == 1 or not rule.keeps_replicas_equal):
        return
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise SettingsError(
                f"an embedding must have no max_norm on several ranks, since each would shorten in forward only the "
                f"rows that it looks up itself, but {name or 'the module'} has max_norm {part.max_norm:g}; shorten "
                "what is looked up in the model's forward: x * (max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1)"
            )


def refuse_backward(
    frozen: Mapping[str, nn.Parameter], failure: type[Exception] | None, *, is_exchanging: bool
) -> None:
    """Raise GradientError for a backward whose gradients would be lost; the message says why."""
    if failure is not None:
        why = "of a rule that lets workers differ, or in a layout, " if issubclass(failure, NonFiniteError) else ""
        raise GradientError(
            f"backward must not follow an update that failed, but the last one raised {failure.__name__} {why}"
            "after which workers may be out of step; end the run, and go on from a checkpoint"
        )
    if is_exchanging:
        raise GradientError(
            "update() must be called after backward(last=True), and both must end well, but backward was called again; "
            "call update, or if backward raised an error, end the run and go on from a checkpoint"
        )
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise GradientError(
                f"{name} must stay frozen, but requires_grad was set after the replica was made, so that its "
                "gradient would not be exchanged; unfreeze first, then make a new Replica"
            )


def check_hashing(interval: int, rule: Rule, layout: Layout, landing: Landing) -> None:
    """Refuse a comparison of gradients that need not be equal, or are gone before they could be compared.

    Args:
        interval: Steps from one comparison to the next; 0 for none.
        rule: Synchronisation rule.
        layout: Layout of the model.
        landing: Moment at which gradients are applied.
    """
    if interval and not (isinstance(rule, EveryStep) and layout.is_plain and landing == "update"):
        raise ValueError(
            f"gradient_hash_interval must be 0 with sync {rule.name}, landing {landing} and {layout}, but "
            f"got {interval}; take sync every_step with landing update, or leave it out"
        )
