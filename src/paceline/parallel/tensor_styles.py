"""The styles of a tensor plan: how a module uses its parameters and activations when ranks share matrices."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from paceline.errors import SettingsError
from paceline.parallel.activations import Activations
from paceline.parallel.own_forward import is_in_forward
from paceline.parallel.parameter_changes import WholeParameter
from paceline.parallel.tensor_attention import check_heads, split_heads

Style = Literal[
    "columns",
    "columns:2",
    "columns:3",
    "rows",
    "gathered_columns",
    "sliced_rows",
    "heads",
    "vocabulary",
    "gather",
    "sequence",
    "cut",
    "partial",
    "replicate",
]
"""Style in which a module is split:

- ``columns``: a linear map; each rank has some of the outputs. Takes whole inputs.
- ``columns:2``, ``columns:3``: two or three maps of equal size in one matrix, one after the other (gate and value;
  query, key and value); each rank has some of the outputs of each.
- ``rows``: a linear map; each rank has some of the inputs, and the ranks' sums are added.
- ``gathered_columns``: as ``columns``, for a module that needs all outputs: they are gathered.
- ``sliced_rows``: as ``rows``, for a module with all inputs: each rank takes its own of them.
- ``heads``: an `nn.MultiheadAttention`; each rank has some of the heads.
- ``vocabulary``: an embedding or the last linear map; each rank has some of the vocabulary's rows.
- ``gather``: a block whose first input is gathered from the ranks' tokens once, for all columns in it.
- ``sequence``: a norm, or another map token by token, over this rank's tokens. If a plan has one, the tokens between
  blocks are split.
- ``cut``: returns what every rank has in full (embedded positions); each keeps its tokens' part.
- ``partial``: whole weights inside a block, used on this rank's heads or columns only.
- ``replicate``: whole weights, on the activations between blocks. The style of all modules that a plan leaves out.
"""

STYLES: tuple[Style, ...] = get_args(Style)

COLUMNS = ("columns", "columns:2", "columns:3", "gathered_columns")
_ROWS = ("rows", "sliced_rows")


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear map that can be split."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is the linear map of GPT-2 in the transformers library, whose weight is (in, out)."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils" for kind in type(module).__mro__
    )


def count_parts(style: Style) -> int:
    """Return the number of maps in one matrix."""
    return int(style.partition(":")[2] or 1)


def placement_of(style: Style, module: nn.Module, parameter: str) -> Placement:
    """Return the placement of a module's parameter along the tensor axis."""
    outputs, inputs = (1, 0) if is_transposed(module) and parameter == "weight" else (0, 1)
    if style == "heads":
        return _fused(0, 3) if parameter == "in_proj_weight" else Shard(0) if parameter in _SEPARATE else Replicate()
    if count_parts(style) > 1:  # a fused bias is whole, since sharding may divide it in no other dim
        return _fused(outputs, count_parts(style)) if parameter == "weight" else Replicate()
    if style in (*COLUMNS, "vocabulary"):
        return Shard(outputs)
    if style in _ROWS and parameter == "weight":
        return Shard(inputs)
    return Replicate()


_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def _fused(dim: int, num_parts: int) -> Placement:
    # Torch's own placement for a dim of which every rank has a slice of each of several parts.
    return _StridedShard(dim, split_factor=num_parts)


def own_part(style: Style, module: nn.Module, name: str, whole: Tensor, place: int, size: int) -> Tensor:
    """Return what a rank sees of a whole parameter, which may be a gradient of it; a view or a copy."""
    placement = placement_of(style, module, name)
    if count_parts(style) > 1 and placement.is_replicate():
        placement = _fused(0, count_parts(style))
    return slice_of(placement, whole, place, size)


def slice_of(placement: Placement, whole: Tensor, place: int, size: int) -> Tensor:
    """Return a rank's part of a whole tensor with a placement; a view or a copy."""
    if isinstance(placement, _StridedShard):
        parts: Tensor = whole.unflatten(placement.dim, (int(placement.split_factor), size, -1))
        return parts.select(placement.dim + 1, place).flatten(placement.dim, placement.dim + 1)
    return whole.chunk(size, placement.dim)[place] if isinstance(placement, Shard) else whole


def check(style: Style, name: str, module: nn.Module, size: int) -> None:
    """Raise `SettingsError` if a module cannot have a style on `size` ranks."""
    if style == "heads":
        check_heads(name, module)
        assert isinstance(module, nn.MultiheadAttention)
        check_multiple(f"num_heads of {name}", module.num_heads, size)
    if style not in (*COLUMNS, *_ROWS, "vocabulary"):
        return
    is_known = is_linear(module) or (style == "vocabulary" and isinstance(module, nn.Embedding))
    if not is_known or (style == "vocabulary" and is_transposed(module)):
        known = "an nn.Linear or nn.Embedding" if style == "vocabulary" else "an nn.Linear"
        raise SettingsError(
            f"a module of style {style!r} must be {known}, but {name} is a {type(module).__name__}; name one "
            "inside it, or leave it out of the tensor plan"
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse or module.scale_grad_by_freq):
        raise SettingsError(
            f"an embedding of style 'vocabulary' must have no max_norm, sparse or scale_grad_by_freq, but {name} has; "
            "build it without, or leave it out of the tensor plan"
        )
    num_inputs, num_outputs = count_features(module)
    what = "vocabulary" if style == "vocabulary" else "inputs" if style in _ROWS else "outputs"
    number, num_parts = num_inputs if style in _ROWS else num_outputs, count_parts(style)
    if number % num_parts:
        raise SettingsError(
            f"a matrix of style {style!r} must hold {num_parts} maps of equal size, but {name} has {number} outputs; "
            "take 'gathered_columns' for it and 'sliced_rows' for the map after it"
        )
    check_multiple(
        f"the {what} of {f'each of the {num_parts} maps in ' if num_parts > 1 else ''}{name}", number // num_parts, size
    )


def count_features(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear map, or of the width and the vocabulary of an embedding."""
    assert isinstance(module.weight, Tensor)
    num_outputs, num_inputs = reversed(module.weight.shape) if is_transposed(module) else module.weight.shape
    return num_inputs, num_outputs


def check_multiple(what: str, number: int, size: int) -> None:
    """Raise `SettingsError` if `number` things cannot be divided evenly along the tensor axis."""
    if number % size:
        raise SettingsError(
            f"{what} must be a multiple of tensor({size}), but got {number} = {size} * {number // size} + "
            f"{number % size}; choose {number + size - number % size}, or another layout"
        )


def apply(
    style: Style, module: nn.Module, activations: Activations, *, is_in_block: bool, attributes: Mapping[str, Any]
) -> None:
    """Make a module, whose parameters are DTensors already, run on this rank's part of them.

    Args:
        style: Style of the module.
        module: Module, changed in place: from now on its forward pass sees ``module.weight`` as a plain tensor, this
            rank's part of it. ``module.named_parameters()`` still yields the DTensor, and so does ``module.weight`` for
            a loss, where gradients are wanted, unless every rank has all of it.
        activations: Distribution of activations.
        is_in_block: Whether a block around it has gathered its input already.
        attributes: Attributes that the module sees with another value, such as its number of heads.
    """
    is_partial = style == "partial" or (activations.cuts_tokens and style in ("sequence", "cut", "replicate"))
    members: dict[str, _View] = {}
    for name, parameter in module.named_parameters(recurse=False):
        assert isinstance(parameter, DTensor)
        placement = parameter.placements[0]
        is_bias = placement.is_replicate() and name in ("bias", "in_proj_bias")
        num_parts = (3 if style == "heads" else count_parts(style)) if is_bias else 1
        # Added once, not by every rank: a bias of style rows counts on the first.
        counts = not (is_bias and style in _ROWS and activations.place > 0)
        is_summed = is_partial or num_parts > 1 or (is_bias and style in _ROWS)
        gradient = Partial() if placement.is_replicate() and is_summed else placement
        members[name] = _View(gradient, num_parts, counts, activations.place, activations.device_mesh.size())
    if is_transposed(module) and style in COLUMNS:
        attributes = {**attributes, "nf": count_features(module)[1] // activations.device_mesh.size()}
    if members or attributes:
        kind: type[nn.Module] = type(module)
        module.__class__ = _with_views(kind, tuple(members.items()), tuple(attributes.items()))  # type: ignore[arg-type]  # classes can be hashed
    if style == "heads":
        split_heads(module, activations)
    elif style == "vocabulary" and isinstance(module, nn.Embedding):
        _EmbeddingRows(module, activations)
    elif style in (*COLUMNS, "gather", "vocabulary"):
        if not is_in_block:
            module.register_forward_pre_hook(_on_first_input(activations.gather), with_kwargs=True)
        if style == "vocabulary":
            module.register_forward_hook(lambda module, args, output: activations.finish(output))
        if style == "gathered_columns":
            module.register_forward_hook(lambda module, args, output: activations.join_features(output))
    elif style in _ROWS:
        if style == "sliced_rows":
            module.register_forward_pre_hook(_on_first_input(activations.slice_features), with_kwargs=True)
        module.register_forward_hook(lambda module, args, output: activations.add(output))
    elif style == "cut":
        module.register_forward_hook(lambda module, args, output: activations.cut(output))


class _EmbeddingRows:
    """Some rows of an embedding's table: tokens of other ranks' rows give zeros here (Shoeybi 2019)."""

    def __init__(self, module: nn.Embedding, activations: Activations) -> None:
        self._activations = activations
        self._num_rows = module.num_embeddings // activations.device_mesh.size()
        self._begin = activations.place * self._num_rows
        self._elsewhere: Tensor | None = None
        if module.padding_idx is not None:
            row = module.padding_idx - self._begin
            module.padding_idx = row if 0 <= row < self._num_rows else None
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        rows = args[0] - self._begin
        self._elsewhere = (rows < 0) | (rows >= self._num_rows)
        return (rows.masked_fill(self._elsewhere, 0),)

    def _leave(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        assert self._elsewhere is not None
        here = output.masked_fill(self._elsewhere[..., None], 0)
        self._elsewhere = None
        return self._activations.add(here)


def _on_first_input(move: Callable[[Tensor], Tensor]) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return a hook that moves the first tensor among a module's arguments, positional or by name."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if args:
            return (move(args[0]), *args[1:]), kwargs
        first = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, first: move(kwargs[first])}

    return hook


class _View(NamedTuple):
    """What a rank sees of a parameter."""

    gradient: Placement
    """Placement of the parameter's gradient."""
    num_parts: int
    """Number of equal parts of a whole parameter of which the rank sees a slice each; 1 if it sees what it holds."""
    counts: bool
    """Whether the parameter counts on this rank; it sees zeros otherwise."""
    place: int
    """Index of the rank on the axis."""
    size: int
    """Number of ranks on the axis."""


@cache
def _with_views(
    kind: type[nn.Module], views: tuple[tuple[str, _View], ...], attributes: tuple[tuple[str, Any], ...]
) -> type[nn.Module]:
    """Return a class whose modules show this rank's part of their parameters; everything else does not change."""
    # Torch's kernels return gradients in memory of their own. Others may be one tensor with another parameter's, which
    # autograd copies, but not inside a DTensor: adding the next micro-batch's would then add both.
    is_own = kind.__module__.startswith("torch.nn.") or kind.__name__ == "Conv1D"
    members: dict[str, Any] = {name: _view(name, view, is_own=is_own) for name, view in views}
    members |= {name: _constant(value) for name, value in attributes}
    if issubclass(kind, nn.RNNBase):  # it runs on its own list of parameters
        members["_flat_weights"] = property(
            lambda module: [getattr(module, name) for name in module._flat_weights_names], lambda module, value: None
        )
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})


def _constant(value: Any) -> property:
    return property(lambda module: value)


def _view(name: str, view: _View, *, is_own: bool) -> property:
    placement = Replicate() if view.gradient.is_partial() else view.gradient

    def read(module: nn.Module) -> Tensor:
        parameter = module._parameters[name]
        assert isinstance(parameter, DTensor)
        if parameter.device_mesh.ndim > 1:
            return parameter  # FSDP's part of a part, which it gathers before forward
        if not is_in_forward():
            return WholeParameter.of(parameter) if parameter.placements[0].is_replicate() else parameter
        if not torch.compiler.is_compiling() and parameter.placements[0] != placement:
            parameter = parameter.redistribute(placements=[placement])  # one that a loop has computed from gradients
        part = parameter.to_local(grad_placements=(view.gradient,))
        if part.requires_grad and not is_own:
            part.register_hook(torch.clone)
        if view.num_parts > 1:
            return part.view(view.num_parts, view.size, -1)[:, view.place].flatten()
        return part if view.counts else part * 0.0

    return property(read)
