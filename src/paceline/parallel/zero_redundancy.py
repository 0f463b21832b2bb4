"""An optimizer whose state is sharded over the ranks of the sharded axis: ZeRO's stage 1."""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms import Joinable
from torch.distributed.tensor import DTensor

from paceline.comm.group import Group
from paceline.errors import SettingsError
from paceline.parallel.local import local
from paceline.parallel.mesh import Mesh
from paceline.parallel.start import broadcast_tensors


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

    Args:
        optimizer: New optimizer, of a class whose constructor takes its defaults by name, or all as `defaults`; it is
            not used again.
        mesh: Mesh of the layout.

    Raises:
        SettingsError: The optimizer has taken steps.
    """
    if mesh.size("sharded") == 1:
        return optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _check(optimizer)
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    # A class that takes its defaults in one argument, like torch's base class, gets them here.
    make = partial(kind, defaults=optimizer.defaults) if "defaults" in accepted else kind
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return DividedOptimizer(optimizer, lambda groups: make(groups, **defaults), mesh.group("sharded"))
    with warnings.catch_warnings():  # torch compiles unused optimizers, in a deprecated way
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        [dict(group) for group in optimizer.param_groups],
        optimizer_class=make,  # type: ignore[arg-type]
        process_group=mesh.process_group("sharded"),
        # One broadcast per rank rather than per parameter; but it would undo other memory formats.
        parameters_as_bucket_view=all(parameter.is_contiguous() for parameter in parameters),
        **defaults,
    )


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
        make: Function that makes one like it, of other groups.
        group: Ranks among which parameters are divided, the largest first, each to the rank with the least so far.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        group: Group,
    ) -> None:
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
        self.local = make([{**each, "params": part} for each, part in zip(self.param_groups, parts, strict=True)])
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


def _check(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        raise SettingsError(
            f"an optimizer that ranks share must be new, but got one that keeps state of {len(optimizer.state)} "
            "parameters; share it first, then load its state"
        )
