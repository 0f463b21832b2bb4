"""Gradients and parameters sharded over the ranks of the sharded axis: ZeRO's stages 2 and 3."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only

from paceline.errors import SettingsError
from paceline.parallel.local import fused_parts, list_gathered
from paceline.parallel.mesh import Mesh
from paceline.parallel.parameter_hooks import carry_hooks, find_hooks
from paceline.parallel.second_order import differentiated_once


def shard_module(
    module: nn.Module,
    mesh: Mesh,
    *,
    zero_stage: Literal[2, 3] = 3,
    blocks: Sequence[str] | None = None,
    gather_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard every parameter over the ranks of the sharded axis, in place, and return the module.

    ZeRO (Rajbhandari 2020) by torch's FSDP2. Each block's parameters are gathered before its forward, and the sum of
    its gradients scattered after its backward, while other blocks compute; every parameter becomes a DTensor, split
    along its first dim as `torch.chunk` does. Hooks of the parameters see a rank's own gradient of all of one, before
    the sum; those that are registered later run once its part of the sum is in its gradient. With one rank along the
    axis it is plain training, and nothing is done. Parameters without dims stay whole on every rank, which sums
    their gradients nowhere: see `ModelShard.clear_unused_gradients`.

    In memory, of n ranks: 1/n of parameters, gradients and optimizer state, and one block's full parameters and
    gradients; in stage 2 all full parameters from forward to backward. On the wire each rank sends, times (n-1)/n:
    parameters twice and gradients once in stage 3, each once in stage 2, like a sum of gradients alone.

    Unlike in torch's default, gradients are summed, never averaged: losses are numerators, whose weight is exchanged
    separately. After a forward without gradients all parameters are freed again, so that the next forward sees their
    new values.

    Forward and backward are collective: every rank along the axis runs the same number of them. Apply tensor
    parallelism before this.

    Args:
        module: Module to shard; the same on every rank along the axis.
        mesh: Mesh of the layout.
        zero_stage: Stage 2 keeps gathered parameters from forward to backward; stage 3 gathers them twice.
        blocks: Names of the modules that are each gathered separately; by default those of `find_blocks`.
        gather_dtype: Dtype of parameters on the wire and in forward; by default their own. Sums always have their own.

    Raises:
        SettingsError: A parameter cannot be sharded, or a block does not exist.
    """
    if mesh.size("sharded") == 1:
        return module
    policy = MixedPrecisionPolicy(gather_dtype, reduce_dtype=check_parameters(module), cast_forward_inputs=False)
    found = _list_blocks(module, find_blocks(module) if blocks is None else blocks)
    hooks = find_hooks(module)
    scalars = {parameter for parameter in module.parameters() if parameter.dim() == 0}
    device_mesh = mesh.device_mesh["sharded"]
    # Torch's None: free parameters after forward, except the root's, since backward begins with its end.
    reshard_after_forward = None if zero_stage == 3 else False
    for block in [*found, module]:
        block.register_forward_hook(_without_views)
        fully_shard(
            block,
            mesh=device_mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            shard_placement_fn=_choose_dim,
            ignored_params=scalars,
        )
    carry_hooks([*found, module], hooks)
    for part in _sharded_modules(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo supports no other
        # Otherwise ranks that used different parameters of a block would sum messages of different sizes.
        part.set_reduce_scatter_unused_params(True)
    module.register_forward_hook(_reshard_after_evaluation)
    return module


def adopt_parameters(module: nn.Module) -> None:
    """Go on with parameters that have taken the place of those that were sharded, with the same slices."""
    for part in _sharded_modules(module):
        for parameter in list_gathered(part):
            parameter.reset_sharded_param()


def _choose_dim(parameter: nn.Parameter) -> Shard | None:
    """Return another dim than the first for a matrix that joins several, whose slices cannot be cut into blocks."""
    dim, num_parts = fused_parts(parameter)
    return Shard(1) if num_parts > 1 and dim == 0 else None


@contextmanager
def tied(module: nn.Module) -> Iterator[None]:
    """Give every name of a parameter of `module` the parameter that replaces it inside.

    A part of a model is sharded under some names only, such as a stage with the head, but not with the embedding whose
    matrix it uses.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((part, name))
    yield
    for old, holders in places.items():
        new = [part._parameters[name] for part, name in holders if part._parameters[name] is not old]
        for part, name in holders if new else ():
            part._parameters[name] = new[0]


def find_blocks(module: nn.Module) -> list[str]:
    """Return the names of the modules that are each gathered separately.

    They are the children of the outermost `nn.ModuleList`, `nn.ModuleDict` and `nn.Sequential`, if they have
    parameters and share none with the rest of the model. Everything else (embeddings, heads, tied parameters)
    is gathered with the root.
    """
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    return [name for name, block in _candidates(module, "") if _is_closed(block, uses)]


def set_gradient_sync(module: nn.Module, is_on: bool, *, keep_gathered: bool = False) -> None:
    """Set whether the next backward passes sum gradients over the sharded axis.

    Without summing, each rank adds up full gradients, which takes their memory, and parameters have no `grad`; the next
    pass with summing sums them all. A module that is not sharded does not change.

    Args:
        module: Module that `shard_module` returned.
        is_on: Whether passes sum; the same on every rank.
        keep_gathered: Whether parameters stay gathered after passes without summing, as suits stage 2.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(is_on)
        module.set_reshard_after_backward(is_on or not keep_gathered)


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, so that the module's parameters are this rank's parts.

    Needed after a forward with gradients but no backward, and after a failed pass, whose gradients are
    dropped. A module that is not sharded does not change.
    """
    if isinstance(module, FSDPModule):
        module.reset_iter_state()
        for part in _sharded_modules(module):
            part.reshard()


def set_reduce_scatter(module: nn.Module, name: str, program: ReduceScatter) -> None:
    """Let `program` sum the gradients of one block (of the root for an empty name)."""
    part = module.get_submodule(name)
    if not isinstance(part, FSDPModule):
        raise SettingsError(f"a block must be one that is gathered by itself, but got {name!r}; see find_blocks")
    part.set_custom_reduce_scatter(program)


def list_blocks(module: nn.Module) -> dict[str, list[str]]:
    """Return the gradients that a sharded module sums together, by block, in their order on the wire."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    blocks = {}
    for block, part in module.named_modules():
        if isinstance(part, FSDPModule):
            # Torch has its order nowhere else.
            held = [parameter.sharded_param for parameter in list_gathered(part)]
            blocks[block] = [names[id(parameter)] for parameter in held if parameter.requires_grad]
    return {block: held for block, held in blocks.items() if held}


def _candidates(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if is_container and type(child).forward is not nn.Module.forward:
            yield name, child
        else:
            yield from _candidates(child, f"{name}.")


def _is_closed(block: nn.Module, uses: Counter[int]) -> bool:
    mine = Counter(id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False))
    return len(mine) > 0 and all(uses[key] == count for key, count in mine.items())


def _list_blocks(module: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    found = dict(module.named_modules())
    if unknown := [name for name in names if name not in found or not name]:
        known = ", ".join(name for name in found if name)
        raise SettingsError(f"a block must be a module inside the model, but got {unknown[0]!r}; there are: {known}")
    inner_first = sorted(names, key=lambda name: name.count("."), reverse=True)
    return [found[name] for name in inner_first]


def check_parameters(module: nn.Module) -> torch.dtype:
    """Return the dtype of the parameters, and raise `SettingsError` if they cannot be sharded."""
    for name, parameter in module.named_parameters():
        if not parameter.is_contiguous():
            raise SettingsError(
                f"a sharded parameter must be contiguous, but {name} has strides {tuple(parameter.stride())}; "
                "leave memory formats such as channels_last to inputs, or shard with zero_stage 1"
            )
    dtypes = {parameter.dtype: name for name, parameter in module.named_parameters() if parameter.dim()}
    if len(dtypes) != 1:
        named = ", ".join(f"{name} of {dtype}" for dtype, name in dtypes.items())
        raise SettingsError(
            f"sharded parameters must be of one dtype, but there are {named or 'none'}; convert the module, or shard "
            "with zero_stage 1"
        )
    return next(iter(dtypes))


def _sharded_modules(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


class _Alias(torch.autograd.Function):
    """The same numbers in the same memory, as a tensor that is no view to autograd."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def _without_base(tensor: Tensor) -> Tensor:
    if tensor._base is None:
        return tensor
    alias: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return alias


def _without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return the output without views.

    Torch gathers parameters for backward by a hook on a block's output, which changing a view in place would drop.
    """
    if not torch.is_grad_enabled():
        return output
    return tree_map_only(Tensor, lambda one: differentiated_once(_without_base(one), "sharded"), output)


def _reshard_after_evaluation(module: nn.Module, inputs: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        for part in _sharded_modules(module):
            part.reshard()
