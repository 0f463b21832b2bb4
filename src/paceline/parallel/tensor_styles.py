"""The styles of a tensor plan: how a module uses its parameters and activations when ranks share matrices."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from paceline.errors import SettingsError
from paceline.parallel.activations import Activations

Style = Literal["columns", "rows", "vocabulary", "gather", "sequence", "cut", "partial", "replicate"]
"""Style in which a module is split:

- ``columns``: a linear map; each rank has some of the outputs. Takes whole inputs.
- ``rows``: a linear map; each rank has some of the inputs, and the ranks' sums are added.
- ``vocabulary``: an embedding or the last linear map; each rank has some of the vocabulary's rows.
- ``gather``: a block whose first input is gathered from the ranks' tokens once, for all columns in it.
- ``sequence``: a norm, or another map token by token, over this rank's tokens. If a plan has one, the tokens between
  blocks are split.
- ``cut``: returns what every rank has in full (embedded positions); each keeps its tokens' part.
- ``partial``: whole weights inside a block, used on this rank's heads or columns only.
- ``replicate``: whole weights, on the activations between blocks. The style of all modules that a plan leaves out.
"""

STYLES: tuple[Style, ...] = get_args(Style)

_Views = tuple[tuple[str, Placement, bool], ...]
"""Name of each parameter of a module, placement of its gradient, and whether this rank's counts."""


def placement_of(style: Style, parameter: str) -> Placement:
    """Return the placement of a module's parameter along the tensor axis."""
    if style in ("columns", "vocabulary"):
        return Shard(0)
    if style == "rows" and parameter == "weight":
        return Shard(1)
    return Replicate()


def check(style: Style, name: str, module: nn.Module, size: int) -> None:
    """Raise `SettingsError` if a module cannot have a style on `size` ranks."""
    kinds: dict[Style, tuple[type[nn.Module], ...]] = {
        "columns": (nn.Linear,),
        "rows": (nn.Linear,),
        "vocabulary": (nn.Linear, nn.Embedding),
    }
    if style not in kinds:
        return
    if not isinstance(module, kinds[style]):
        known = " or ".join(f"nn.{kind.__name__}" for kind in kinds[style])
        raise SettingsError(
            f"a module of style {style!r} must be an {known}, but {name} is a {type(module).__name__}; name one "
            "inside it, or leave it out of the tensor plan"
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse or module.scale_grad_by_freq):
        raise SettingsError(
            f"an embedding of style 'vocabulary' must have no max_norm, sparse or scale_grad_by_freq, but {name} has; "
            "build it without, or leave it out of the tensor plan"
        )
    assert isinstance(module.weight, Tensor)
    dim = 1 if style == "rows" else 0
    number = module.weight.shape[dim]
    what = "vocabulary" if style == "vocabulary" else "inputs" if style == "rows" else "outputs"
    check_multiple(f"the {what} of {name}", number, size)


def check_multiple(what: str, number: int, size: int) -> None:
    """Raise `SettingsError` if `number` things cannot be divided evenly along the tensor axis."""
    if number % size:
        raise SettingsError(
            f"{what} must be a multiple of tensor({size}), but got {number} = {size} * {number // size} + "
            f"{number % size}; choose {number + size - number % size}, or another layout"
        )


def apply(style: Style, module: nn.Module, activations: Activations, *, is_in_block: bool) -> None:
    """Make a module, whose parameters are DTensors already, run on this rank's part of them.

    Args:
        style: Style of the module.
        module: Module, changed in place: from now on ``module.weight`` is this rank's part of it as a plain tensor,
            ``module.named_parameters()`` still yields the DTensor.
        activations: Distribution of activations.
        is_in_block: Whether a block around it has gathered its input already.
    """
    is_partial = style == "partial" or (activations.cuts_tokens and style in ("sequence", "cut", "replicate"))
    views = []
    for name, parameter in module.named_parameters(recurse=False):
        assert isinstance(parameter, DTensor)
        placement = parameter.placements[0]
        # Added once, not by every rank: a bias of style rows counts on the first.
        is_bias_of_rows = style == "rows" and placement.is_replicate()
        gradient = Partial() if placement.is_replicate() and (is_partial or is_bias_of_rows) else placement
        views.append((name, gradient, not is_bias_of_rows or activations.place == 0))
    if views:
        kind: type[nn.Module] = type(module)
        module.__class__ = _with_views(kind, tuple(views))  # type: ignore[arg-type]  # classes can be hashed
    if style == "vocabulary" and isinstance(module, nn.Embedding):
        _EmbeddingRows(module, activations)
    elif style in ("columns", "gather", "vocabulary"):
        if not is_in_block:
            module.register_forward_pre_hook(_on_first_input(activations.gather), with_kwargs=True)
        if style == "vocabulary":
            module.register_forward_hook(lambda module, args, output: activations.finish(output))
    elif style == "rows":
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


@cache
def _with_views(kind: type[nn.Module], views: _Views) -> type[nn.Module]:
    """Return a class whose modules show this rank's part of their parameters; everything else does not change."""
    members: dict[str, Any] = {name: _view(name, gradient, counts) for name, gradient, counts in views}
    if issubclass(kind, nn.RNNBase):  # it runs on its own list of parameters
        members["_flat_weights"] = property(
            lambda module: [getattr(module, name) for name in module._flat_weights_names], lambda module, value: None
        )
    return type(kind.__name__, (kind,), members)


def _view(name: str, gradient: Placement, counts: bool) -> property:
    def read(module: nn.Module) -> Tensor:
        parameter = module._parameters[name]
        assert isinstance(parameter, DTensor)
        if parameter.device_mesh.ndim > 1:
            return parameter  # FSDP's part of a part, which it gathers before forward
        part = parameter.to_local(grad_placements=(gradient,))
        return part if counts else part * 0.0

    return property(read)
