"""The style of each module of a model on the tensor axis, and whether it is possible."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement

from paceline.errors import SettingsError, unknown_name
from paceline.parallel.pipeline.layers import AbsentModule
from paceline.parallel.tensor_styles import STYLES, Style, check, check_multiple, placement_of


class TiedHead(nn.Module):
    """The last linear map, with the matrix of an embedding (Press and Wolf 2017). It is split like that embedding.

    Args:
        bias: Bias of shape (vocabulary,), or None.
    """

    def __init__(self, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.bias: Tensor | None
        self.register_parameter("bias", bias)

    def forward(self, x_BTW: Tensor, weight_VW: Tensor) -> Tensor:
        """Return logits_BTV."""
        return F.linear(x_BTW, weight_VW, self.bias)


@dataclass(frozen=True)
class _KnownType:
    """Styles of modules of a type."""

    styles: Mapping[str, Style]
    counts: Callable[[Any], Mapping[str, int]] | None


_known_types: dict[type[nn.Module], _KnownType] = {}


def register_styles(
    kind: type[nn.Module],
    styles: Mapping[str, Style],
    *,
    counts: Callable[[Any], Mapping[str, int]] | None = None,
) -> None:
    """Register how modules of a type are split, so that models made of them need no plan.

    Args:
        kind: Type of the modules, without subclasses.
        styles: Styles by name of the child; the empty name is the module itself.
        counts: Function from a module to its numbers that must be divisible if it is split (heads), by name.
    """
    _known_types[kind] = _KnownType(styles, counts)


def is_known(module: nn.Module) -> bool:
    """Return whether styles are registered for the type of a module."""
    return type(module) in _known_types


@dataclass(frozen=True)
class TensorPlan:
    """How a whole model is split over the tensor axis.

    Args:
        styles: Style of each module that has one, by its name.
        attributes: Attributes that a module sees with another value once it is split, such as its number of heads.
        patterns: Styles by patterns of names that a user gave; None if the model decided.
    """

    styles: Mapping[str, Style]
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    patterns: Mapping[str, str] | None = None

    @property
    def cuts_tokens(self) -> bool:
        """Whether ranks keep their own tokens between blocks; the same for all stages of a pipeline."""
        return "sequence" in self.styles.values()

    def of_stage(self, module: nn.Module) -> "TensorPlan":
        """Return the plan of the modules that a stage of a pipeline holds."""
        held = {name for name, part in module.named_modules() if not isinstance(part, AbsentModule)}
        return replace(
            self,
            styles={name: style for name, style in self.styles.items() if name in held},
            attributes={name: seen for name, seen in self.attributes.items() if name in held},
        )


def make_plan(module: nn.Module, patterns: Mapping[str, str] | None, size: int) -> TensorPlan:
    """Return the plan that a user's patterns, or else the registered types of the modules, make.

    Args:
        module: The model.
        patterns: Styles by patterns of module names; the last match counts. None: types decide, and modules of other
            types have no style.
        size: Number of ranks along the tensor axis.

    Raises:
        SettingsError: A name or style is unknown, or a number cannot be divided evenly.
    """
    styles = _plan_by_names(module, patterns) if patterns is not None else _plan_by_types(module)
    _follow_embedding(module, styles)
    return check_plan(module, TensorPlan(complete(module, styles), patterns=patterns), size)


def complete(module: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return styles with those that follow from others: the last map of torch's attention adds up its heads."""
    heads = {name for name, style in styles.items() if style == "heads"}
    followers = [name for name, _ in module.named_modules() if name.endswith("out_proj") and name[:-9] in heads]
    return {**styles, **dict.fromkeys(followers, "rows")}


def check_plan(module: nn.Module, plan: TensorPlan, size: int) -> TensorPlan:
    """Return the plan, or raise `SettingsError` if it is impossible."""
    modules = dict(module.named_modules())
    for name, style in plan.styles.items():
        if not (style == "vocabulary" and isinstance(modules[name], TiedHead)):  # its embedding is checked
            check(style, name, modules[name], size)
    _check_counts(modules, plan.styles, size)
    _check_blocks(modules, plan.styles)
    place(module, plan.styles)
    return plan


def place(module: nn.Module, styles: Mapping[str, Style]) -> dict[int, Placement]:
    """Return the placement of each parameter, by its id; tied parameters have one placement.

    Raises:
        SettingsError: Two modules that share a parameter are split differently.
    """
    placements: dict[int, Placement] = {}
    first_names: dict[int, str] = {}
    for name, part in module.named_modules():
        for parameter_name, parameter in part.named_parameters(recurse=False):
            placement = placement_of(styles.get(name, "replicate"), part, parameter_name)
            full_name = f"{name}.{parameter_name}".strip(".")
            first = first_names.setdefault(id(parameter), full_name)
            if placements.setdefault(id(parameter), placement) != placement:
                raise SettingsError(
                    f"tied parameters must be split equally, but {first} and {full_name} are one, and the tensor plan "
                    f"makes them {placements[id(parameter)]} and {placement}; give both modules the same style"
                )
    return placements


def _plan_by_types(module: nn.Module) -> dict[str, Style]:
    styles: dict[str, Style] = {}
    for name, part in module.named_modules():
        known = _known_types.get(type(part))
        children = dict(part.named_modules())
        for child, style in known.styles.items() if known is not None else ():
            if child in children:
                styles[f"{name}.{child}".strip(".")] = style
    return styles


def _plan_by_names(module: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    names = [name for name, _ in module.named_modules() if name]
    styles: dict[str, Style] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise unknown_name(f"the style of {pattern!r} in the tensor plan", style, STYLES)
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            known = {".".join("*" if word.isdigit() else word for word in name.split(".")) for name in names}
            raise unknown_name("a pattern in the tensor plan", pattern, known)
        styles |= dict.fromkeys(matched, style)
    return styles


def _follow_embedding(module: nn.Module, styles: dict[str, Style]) -> None:
    """Give tied heads the style of their embedding."""
    heads = [name for name, part in module.named_modules() if isinstance(part, TiedHead)]
    is_cut = any(
        style == "vocabulary" and isinstance(module.get_submodule(name), nn.Embedding) for name, style in styles.items()
    )
    for head in heads:
        if is_cut:
            styles[head] = "vocabulary"
        elif styles.get(head) == "vocabulary":
            raise SettingsError(
                f"a tied head must be split like its embedding, but the tensor plan names {head} alone; name the "
                "embedding with style 'vocabulary' too"
            )


def _check_counts(modules: Mapping[str, nn.Module], styles: Mapping[str, Style], size: int) -> None:
    for name, part in modules.items():
        known = _known_types.get(type(part))
        if known is None or known.counts is None:
            continue
        if any(styles.get(f"{name}.{child}".strip(".")) in ("columns", "rows") for child in known.styles):
            for what, number in known.counts(part).items():
                check_multiple(f"{what} of {name}", number, size)


def list_blocks(styles: Mapping[str, Style]) -> tuple[str, ...]:
    """Return the name prefixes of all modules in blocks of style ``gather``."""
    return tuple(f"{name}." for name, style in styles.items() if style == "gather")


def _check_blocks(modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> None:
    blocks = list_blocks(styles)
    for name, part in modules.items():
        has_parameters = next(part.parameters(recurse=False), None) is not None
        if has_parameters and name.startswith(blocks) and styles.get(name, "replicate") == "replicate":
            block = next(block for block in blocks if name.startswith(block))[:-1]
            raise SettingsError(
                f"every module with parameters inside a block of style 'gather' must be split or partial, but {name} "
                f"in {block} is not; name it 'partial' if it works on this rank's columns only, or let the columns "
                f"gather separately: leave {block} out of the tensor plan"
            )
