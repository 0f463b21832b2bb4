"""An optimizer whose state is sharded over the ranks of the sharded axis: ZeRO's stage 1."""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.algorithms import Joinable
from torch.distributed.tensor import DTensor

from paceline.comm.group import Group
from paceline.errors import SettingsError
from paceline.parallel.local import local
from paceline.parallel.mesh import Mesh
from paceline.parallel.start import broadcast_tensors

_OWN = frozenset(vars(torch.optim.SGD([torch.empty(0)]))) - {"defaults"} | {"step"}
"""Attributes in which torch keeps an optimizer's parameters, state and hooks, and schedulers their count of steps."""


def shard_optimizer(optimizer: torch.optim.Optimizer, mesh: Mesh) -> torch.optim.Optimizer:
    """Return an optimizer like `optimizer` that updates one part of the parameters on each rank of the sharded axis.

    ZeRO's stage 1 (Rajbhandari 2020) by torch's ZeroRedundancyOptimizer, or, beside a tensor axis, whose DTensors that
    does not take, by `DividedOptimizer`. Whole parameters (beside a tensor axis, this rank's part of each) are
    assigned, the largest first, each to the rank with the least so far; after a step every rank sends its updated
    parameters to the others. All ranks must have the same gradients: they are summed over the sharded axis like over
    data. With one rank along the axis the optimizer is returned unchanged.

    In memory, of n ranks: about 1/n of the optimizer's state; full parameters and gradients. On the wire: besides the
    sum of gradients, one broadcast of each rank's part, (n-1)/n of the parameters from each.

    Parameter groups stay the same: a value set in them (the learning rate) takes effect in the next step. The
    optimizer's state is that of `local_optimizer`.

    Each rank steps an optimizer of the same class with the same attributes, also where they change later. Hooks on the
    steps of `optimizer` run around those of all ranks; they get it, with all parameters, and this rank's part of the
    state: what a loop changes in ``optimizer.state``, or clears, counts.

    Args:
        optimizer: New optimizer. Its parameter groups are those of the returned one from now on; its step is not used.
        mesh: Mesh of the layout.

    Raises:
        SettingsError: The optimizer has taken steps, or its `step` is another than its class's.
    """
    if mesh.size("sharded") == 1:
        return optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _check(optimizer)
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        divided: torch.optim.Optimizer = DividedOptimizer(optimizer, mesh.group("sharded"))
    else:
        with warnings.catch_warnings():  # torch compiles unused optimizers, in a deprecated way
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer

        divided = ZeroRedundancyOptimizer(
            [dict(group) for group in optimizer.param_groups],
            optimizer_class=lambda groups, **_: _take_part(optimizer, groups),  # type: ignore[arg-type]
            process_group=mesh.process_group("sharded"),
            # One broadcast per rank rather than per parameter; but it would undo other memory formats.
            parameters_as_bucket_view=all(parameter.is_contiguous() for parameter in parameters),
            **optimizer.defaults,
        )
        _keep_places(parameters, divided)
    optimizer.param_groups = divided.param_groups  # for schedulers and hooks
    _share_state(optimizer, local_optimizer(divided))
    _forward_hooks(optimizer, divided)
    return divided


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that this rank updates: of all, unless it is sharded.

    A rank saves its state by the names of its parameters, and needs only that part to load.
    """
    if isinstance(optimizer, DividedOptimizer):
        return optimizer.local
    if isinstance(optimizer, Joinable):
        inner: torch.optim.Optimizer = vars(optimizer)["optim"]
        return inner
    return optimizer


class DividedOptimizer(torch.optim.Optimizer):
    """An optimizer that updates one part of the parameters on each rank of a group.

    Args:
        optimizer: New optimizer of all parameters, whole or DTensors, whose other ranks are not in `group`.
        group: Ranks among which parameters are divided, the largest first, each to the rank with the least so far.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: Group) -> None:
        super().__init__([dict(each) for each in optimizer.param_groups], dict(optimizer.defaults))
        self._group = group
        parameters = [parameter for each in self.param_groups for parameter in each["params"]]
        sizes = [0] * group.size
        self._owned: list[list[torch.Tensor]] = [[] for _ in sizes]
        for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
            owner = sizes.index(min(sizes))
            sizes[owner] += parameter.numel()
            self._owned[owner].append(parameter)
        mine = {id(parameter) for parameter in self._owned[group.rank]}
        parts = [[parameter for parameter in each["params"] if id(parameter) in mine] for each in self.param_groups]
        held = [{**each, "params": part} for each, part in zip(self.param_groups, parts, strict=True)]
        self.local = _take_part(optimizer, held)
        """Optimizer of the parameters that this rank updates."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update this rank's parameters, and get the others' from their ranks."""
        assert closure is None, "a step computes no gradients here"
        for here, there in zip(self.local.param_groups, self.param_groups, strict=True):
            here.update({name: value for name, value in there.items() if name != "params"})
        self.local.step()
        for rank, owned in enumerate(self._owned):
            broadcast_tensors([local(parameter) for parameter in owned], self._group, source=rank)


def _share_state(optimizer: torch.optim.Optimizer, part: torch.optim.Optimizer) -> None:
    """Let an optimizer have the state of the one that steps a part of its parameters, also where it is replaced."""
    optimizer.state = part.state
    part.register_load_state_dict_post_hook(lambda loaded: setattr(optimizer, "state", loaded.state))


def _keep_places(parameters: Sequence[torch.Tensor], divided: torch.optim.Optimizer) -> None:
    """Before each step, take parameters back to the memory from which they are sent, if ``p.data = x`` moved them."""
    places = [parameter.data for parameter in parameters]

    def take_back(*_: Any) -> None:
        for parameter, place in zip(parameters, places, strict=True):
            if parameter.data_ptr() != place.data_ptr():
                place.copy_(parameter.data)
                parameter.data = place

    def note(*_: Any) -> None:
        places[:] = [parameter.data for parameter in parameters]  # torch moves them if some are frozen, in the step

    divided.register_step_pre_hook(take_back)
    divided.register_step_post_hook(note)


def _check(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        raise SettingsError(
            f"an optimizer that ranks share must be new, but got one that keeps state of {len(optimizer.state)} "
            "parameters; share it first, then load its state"
        )
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):  # torch's schedulers count steps so
        raise SettingsError(
            "the step of an optimizer that ranks share must be its class's, but this "
            f"{type(optimizer).__name__} has one of its own; write a class, or register_step_post_hook"
        )


def _take_part(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer of other groups that is the given one in all else, before and after each step."""
    part = object.__new__(type(optimizer))
    state = {"defaults": optimizer.defaults, "param_groups": groups, "state": defaultdict(dict)}
    torch.optim.Optimizer.__setstate__(part, state)  # without the constructor of its class, which may take anything

    kept: dict[str, Any] = {}

    def copy(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
        changed = {n: v for n, v in vars(source).items() if n not in _OWN and not (n in kept and kept[n] is v)}
        kept.update(changed)  # a step that calls its base class's may run hooks again, when nothing has changed here
        vars(target).update(changed)

    copy(optimizer, part)
    part.register_step_pre_hook(lambda *_: copy(optimizer, part))
    part.register_step_post_hook(lambda *_: copy(part, optimizer))
    return part


def _forward_hooks(optimizer: torch.optim.Optimizer, divided: torch.optim.Optimizer) -> None:
    """Let steps of a divided optimizer run the hooks of the whole one, also those that come later."""

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given: tuple[Any, ...] = (optimizer, *args[1:])
        for hook in [*optimizer._optimizer_step_pre_hooks.values()]:
            given, kwargs = hook(optimizer, given, kwargs) or (given, kwargs)
        return (args[0], *given[1:]), kwargs

    def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for hook in [*optimizer._optimizer_step_post_hooks.values()]:
            hook(optimizer, (optimizer, *args[1:]), kwargs)

    divided.register_step_pre_hook(before)
    divided.register_step_post_hook(after)
