"""An optimizer whose state is sharded over the ranks of the sharded axis: ZeRO's stage 1."""

import inspect
import warnings
from functools import partial

import torch
from torch.distributed.algorithms import Joinable
from torch.distributed.tensor import DTensor

from paceline.errors import SettingsError
from paceline.parallel.mesh import Mesh


def shard_optimizer(optimizer: torch.optim.Optimizer, mesh: Mesh) -> torch.optim.Optimizer:
    """Return an optimizer like `optimizer` that updates one part of the parameters on each rank of the sharded axis.

    ZeRO's stage 1 (Rajbhandari 2020) by torch's ZeroRedundancyOptimizer. Whole parameters are assigned, the largest
    first, each to the rank with the least so far; after a step every rank sends its updated parameters to the others.
    All ranks must have the same gradients: they are summed over the sharded axis like over data. With one rank along
    the axis the optimizer is returned unchanged.

    In memory, of n ranks: about 1/n of the optimizer's state; full parameters and gradients. On the wire: besides the
    sum of gradients, one broadcast of each rank's part, (n-1)/n of the parameters from each.

    Parameter groups stay the same: a value set in them (the learning rate) takes effect in the next step. The
    optimizer's state is that of `local_optimizer`.

    Args:
        optimizer: New optimizer, of a class whose constructor takes its defaults by name, or all as `defaults`; it is
            not used again.
        mesh: Mesh of the layout.

    Raises:
        SettingsError: The optimizer has taken steps, or ranks hold parts of its parameters already.
    """
    if mesh.size("sharded") == 1:
        return optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _check(optimizer, parameters)
    with warnings.catch_warnings():  # torch compiles unused optimizers, in a deprecated way
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    return ZeroRedundancyOptimizer(
        [dict(group) for group in optimizer.param_groups],
        # A class that takes its defaults in one argument, like torch's base class, gets them here.
        optimizer_class=(
            partial(kind, defaults=optimizer.defaults) if "defaults" in accepted else kind  # type: ignore[arg-type]
        ),
        process_group=mesh.process_group("sharded"),
        # One broadcast per rank rather than per parameter; but it would undo other memory formats.
        parameters_as_bucket_view=all(parameter.is_contiguous() for parameter in parameters),
        **{name: value for name, value in optimizer.defaults.items() if name in accepted},
    )


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that this rank updates: of all, unless it is sharded.

    A rank saves its state by the names of its parameters, and needs only that part to load.
    """
    if isinstance(optimizer, Joinable):
        inner: torch.optim.Optimizer = vars(optimizer)["optim"]
        return inner
    return optimizer


def _check(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    if optimizer.state:
        raise SettingsError(
            f"an optimizer that ranks share must be new, but got one that keeps state of {len(optimizer.state)} "
            "parameters; share it first, then load its state"
        )
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise SettingsError(
            "parameters must be whole on every rank with zero_stage 1, but got some that are sharded; take "
            "zero_stage 2 or 3 beside a tensor axis"
        )
