"""A model as a sequence of layers, and its remaining part on a rank that holds some of them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, runtime_checkable

from torch import Tensor, nn

from paceline.errors import SettingsError
from paceline.parallel.pipeline.absent import check_listing, make_absent

LAYERS_ADVICE = (
    'give the pipeline a sequence (--pipeline.sequence \'["embedding", "layers.*", "head"]\') of its children as they '
    "are executed, or give the model a method `pipeline_layers`"
)
"""Advice for a model that cannot be cut by itself."""


@dataclass(frozen=True)
class PipelineLayer:
    """A layer of a model for a pipeline: the smallest part that it does not split."""

    name: str
    """Name in `cuts`; the name of its submodule, if it is one."""
    owns: tuple[str, ...]
    """Names of the submodules, parameters and buffers of the model that it uses. Several layers may own the same."""
    run: Callable[[Any], Any]
    """Function from the output of the layer before to its own output. The first gets the model's input: if that
    is several tensors, a tuple of them in the order of the batch."""

    @classmethod
    def child(cls, module: nn.Module, name: str) -> "PipelineLayer":
        """Return the layer of a submodule, which is called with the output of the layer before."""
        return cls(name, (name,), partial(_run_child, module, name))


@runtime_checkable
class HasPipelineLayers(Protocol):
    """A model that lists its own layers: ``forward(x)`` runs them one after the other."""

    def pipeline_layers(self) -> Sequence[PipelineLayer]:
        """Return the layers in the order of execution; each maps a tensor, or a tuple of tensors, to another."""
        ...


def list_layers(module: nn.Module, sequence: Sequence[str] = ()) -> list[PipelineLayer]:
    """Return the layers of `module`.

    Args:
        module: Model with `pipeline_layers`, an `nn.Sequential` (nested ones are opened too), or any model with a
            `sequence`.
        sequence: Names of its children in the order of execution; ``layers.*`` are all children of ``layers``.

    Raises:
        SettingsError: The layers cannot be found, they leave parameters out, or a name is wrong.
    """
    if sequence:
        layers = [PipelineLayer.child(module, name) for pattern in sequence for name in _expand(module, pattern)]
    elif isinstance(module, HasPipelineLayers):
        layers = list(module.pipeline_layers())
    elif type(module) is nn.Sequential:
        layers = [PipelineLayer.child(module, name) for name in _open(module)]
    else:
        children = ", ".join(name for name, _ in module.named_children())
        raise SettingsError(
            "a model must be a sequence of layers to run as a pipeline without a sample, but got "
            f"{type(module).__name__}; give parallelize a sample, give the pipeline a sequence (--pipeline.sequence) "
            f"of the model's children as they are executed (it has: {children}), or give the model a method "
            "`pipeline_layers`"
        )
    _check(module, layers)
    return layers


def find_owned(module: nn.Module, layers: Sequence[PipelineLayer]) -> set[Tensor]:
    """Return the parameters and buffers that `layers` use."""
    owned: set[Tensor] = set()
    for name in {name for layer in layers for name in layer.owns}:
        place, _, leaf = name.rpartition(".")
        holder = module.get_submodule(place)
        child = holder.get_submodule(leaf) if leaf in dict(holder.named_children()) else None
        if child is not None:
            owned.update(child.parameters(), child.buffers())
        else:
            owned.add(getattr(holder, leaf))
    return owned


def find_modules(module: nn.Module, layers: Sequence[PipelineLayer]) -> dict[str, nn.Module]:
    """Return the modules that `layers` use, by name: those that they own, and those that hold a parameter they own.

    In place of a module around others, such as the model itself, there is one that has its parameters alone.
    """
    modules, parameters = dict(module.named_modules()), dict(module.named_parameters(remove_duplicate=False))
    found: dict[str, nn.Module] = {}
    for name in dict.fromkeys(name for layer in layers for name in layer.owns):
        holder = name if name in modules else name.rpartition(".")[0]
        if holder == name or (holder and not any(True for _ in modules[holder].children())):
            found[holder] = modules[holder]
        elif name in parameters:
            alone = found.setdefault(f"{holder}.own", nn.Module())
            alone._parameters = modules[holder]._parameters  # FSDP replaces what is in it
    return found


def list_paths(layers: Sequence[PipelineLayer]) -> set[str]:
    """Return the names of the modules that `layers` use, and of all around them."""
    paths: set[str] = set()
    for name in {name for layer in layers for name in layer.owns}:
        words = name.split(".")
        paths.update(".".join(words[:length]) for length in range(1, len(words) + 1))
    return paths


def keep_only(
    module: nn.Module,
    owned: Collection[Tensor],
    used: Collection[str] = (),
    opened: Collection[str] = (),
    name: str = "",
) -> None:
    """Remove all parameters and buffers from `module` except `owned`, whose names do not change.

    A submodule without remaining tensors becomes an `AbsentModule`.

    Args:
        module: Module to remove them from.
        owned: Parameters and buffers to keep.
        used: Names of modules that remain, since something without tensors in them is used.
        opened: Names of modules that remain, since their forward runs on every rank. In place of what is removed from
            them they keep a tensor of the same shape in a few bytes, whose values are NaN.
        name: Name of `module` among them.
    """
    kept = {id(tensor) for tensor in owned}
    holders: list[dict[str, Any]] = [module._parameters, module._buffers]
    for holder in holders:
        for leaf, tensor in list(holder.items()):
            if tensor is not None and id(tensor) not in kept:
                holder[leaf] = None
                if name in opened:
                    del holder[leaf]
                    object.__setattr__(module, leaf, make_absent(tensor, f"{name}.{leaf}" if name else leaf))
    for leaf, child in list(module._modules.items()):  # under all its names, if it has several
        if child is None:
            continue
        tensors = [*child.parameters(), *child.buffers()]
        place = f"{name}.{leaf}" if name else leaf
        is_empty = bool(tensors) and not any(id(tensor) in kept for tensor in tensors)
        if name in opened and isinstance(child, nn.ParameterList | nn.ParameterDict):
            keep_only(child, owned, used, {place}, place)  # its items are asked for by the forward around it
        elif is_empty and place not in used and place not in opened:
            setattr(module, leaf, AbsentModule(child if opened else None, place))
        else:
            keep_only(child, owned, used, opened, place)


class AbsentModule(nn.Module):
    """Placeholder of a submodule that another rank of the pipeline holds.

    Args:
        original: The submodule, if its attributes are still asked for: it loses its values.
        place: Name of the submodule in the model.
    """

    def __init__(self, original: nn.Module | None = None, place: str = "") -> None:
        super().__init__()
        for prefix, part in original.named_modules(prefix=place) if original is not None else ():
            tensors = {**part._parameters, **part._buffers}
            part._parameters.clear()
            part._buffers.clear()
            for name, tensor in tensors.items():
                object.__setattr__(part, name, None if tensor is None else make_absent(tensor, f"{prefix}.{name}"))
        self._original = (original,)  # in a tuple: it is no submodule of this one
        self._place = place

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the absent module, such as a dtype that forwards around it ask for."""
        (original,) = self.__dict__.get("_original", (None,))
        return getattr(original, name) if original is not None else super().__getattr__(name)

    def __getitem__(self, key: Any) -> Any:
        """Return an item of an absent list, whose tensors have no values."""
        return self._find_list()[key]

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the items of an absent list."""
        return iter(self._find_list())

    def __len__(self) -> int:
        """Return the number of items of an absent list."""
        return len(self._find_list())

    def __contains__(self, item: Any) -> bool:
        """Return whether an absent list or dict has an item."""
        return item in self._find_list()

    def __bool__(self) -> bool:
        """Return that there is something: what has no tensors is never absent."""
        return True

    def _find_list(self) -> Any:
        (original,) = self.__dict__["_original"]
        if original is None:
            raise SettingsError(
                f"a stage of a pipeline must use what it has, but the model asks for items of {self._place}, "
                "which is on another rank; name what each layer uses in pipeline_layers, or set Layout(pipeline=1) "
                "(--layout.pipeline 1)"
            )
        return original

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """Return this module, unless a loss asks for it."""
        check_listing(prefix)
        return super().named_modules(memo, prefix, remove_duplicate)

    def forward(self, *_: Any) -> NoReturn:
        """Raise an error: there is nothing to run here."""
        raise SettingsError(
            "a module cut into stages must be run by its pipeline, but it was called; this part is on another rank"
        )


def _run_child(module: nn.Module, name: str, value: Any) -> Any:
    return module.get_submodule(name)(value)  # looked up on each call: it may have been wrapped since


def _expand(module: nn.Module, pattern: str) -> Iterator[str]:
    place = pattern.removesuffix(".*")
    try:
        child = module.get_submodule(place)
    except AttributeError as error:
        known = ", ".join(name for name, _ in module.named_children())
        raise SettingsError(
            f"pipeline.sequence must name submodules of the model, but got {pattern!r}; it has: {known}"
        ) from error
    if pattern == place:
        yield place
    else:
        yield from (f"{place}.{name}" for name, _ in child.named_children())


def _open(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        if type(child) is nn.Sequential and len(child):
            yield from _open(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _check(module: nn.Module, layers: Sequence[PipelineLayer]) -> None:
    names = [layer.name for layer in layers]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise SettingsError(
            f"the layers of a model must have different names, but {', '.join(twice)} repeat; name each once"
        )
    owned = {id(tensor) for tensor in find_owned(module, layers)}
    left = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if id(tensor) not in owned]
    if left:
        raise SettingsError(
            f"the layers of a model must own all its parameters and buffers, but not {', '.join(left[:5])}; the layers "
            f"are: {', '.join(names)}"
        )
