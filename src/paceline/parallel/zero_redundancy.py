"""An optimizer whose state the ranks of the sharded axis share out among them: ZeRO's stage 1."""

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

    ZeRO's stage 1 (Rajbhandari 2020) by torch's ZeroRedundancyOptimizer. Whole parameters are shared out, the largest
    first, each to the rank that has least so far; after a step every rank sends those it updated to the others. All
    ranks must have the same gradients: they are summed over the sharded axis as over data. With one rank along the axis
    the optimizer is returned as it is.

    In memory, of n ranks: about 1/n of the optimizer's state; parameters and gradients whole. On the wire: besides the
    sum of gradients, one broadcast of each rank's part, (n-1)/n of the parameters from each.

    Groups of parameters stay as they are: what is set in them (the learning rate) holds from the next step on. Its
    state is that of `local_optimizer`.

    Args:
        optimizer: Newly built, of a class whose constructor takes its defaults by name, or all as `defaults`; it is not
            used again.
        mesh: The layout.

    Raises:
        SettingsError: It has taken steps, or parameters of which ranks hold parts already.
    """
    if mesh.size("sharded") == 1:
        return optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _check(optimizer, parameters)
    with warnings.catch_warnings():  # torch compiles optimizers that nobody here uses, in a way it calls deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    return ZeroRedundancyOptimizer(
        [dict(group) for group in optimizer.param_groups],
        # One that takes its defaults in one piece, as torch's base class does, takes them here.
        optimizer_class=(
            partial(kind, defaults=optimizer.defaults) if "defaults" in accepted else kind  # type: ignore[arg-type]
        ),
        process_group=mesh.process_group("sharded"),
        # One broadcast a rank rather than one a parameter; but it would undo other memory formats.
        parameters_as_bucket_view=all(parameter.is_contiguous() for parameter in parameters),
        **{name: value for name, value in optimizer.defaults.items() if name in accepted},
    )


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that this rank updates: of all, unless it is shared out.

    Its state is what this rank has to save, by the names of its parameters; loaded, it wants no more than that.
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
            "parameters must be whole on every rank with zero_stage 1, but got some that ranks hold parts of; take "
            "zero_stage 2 or 3 beside a tensor axis"
        )
