"""A tensor plan of a model that has none: found by running the model once, and proved block by block before it is used.

Linear maps that follow each other are columns and rows, if all between them works head by head or number by number.
Whether it does is not concluded from types but tried: a block runs once for every rank with that rank's part of the
matrices, on this process alone, and the sum of the results must equal the whole block's. So do numbers of heads that a
module keeps as attributes, and matrices that join queries, keys and values.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from torch import nn

from paceline.errors import SettingsError
from paceline.parallel.tensor_plan import TensorPlan, check_plan, complete, is_known, make_plan
from paceline.parallel.tensor_proof import Pair, Trace, find_variation, list_attributes, list_pairs, prove, prove_alone
from paceline.parallel.tensor_styles import COLUMNS, Style, check, count_features, is_linear

TRANSLATIONS: Mapping[str, Style] = {
    "colwise": "columns",
    "rowwise": "rows",
    "packed_colwise": "columns:2",
    "colwise_gather_output": "gathered_columns",
    "colwise_rep": "gathered_columns",
    "rowwise_split_input": "sliced_rows",
    "embedding_rowwise": "vocabulary",
}
"""Styles of the plans that models of the transformers library bring, in ours; the others are found by trying."""

_Proved = tuple[dict[str, Style], dict[str, Mapping[str, Any]]]
"""Styles and attributes, by names of modules."""


def find_plan(module: nn.Module, patterns: Mapping[str, str] | None, size: int, inputs: Any) -> TensorPlan:
    """Return the tensor plan of a model: a user's, that of registered types, the model's own, or what can be proved.

    Args:
        module: The model, whole, in evaluation mode.
        patterns: Styles by patterns of module names; None: the model decides.
        size: Number of ranks along the tensor axis.
        inputs: Inputs of the model for a sample.

    Raises:
        SettingsError: A name or style is unknown, a number cannot be divided evenly, or nothing can be split.
    """
    plan = make_plan(module, patterns, size)
    if plan.cuts_tokens and patterns is None:
        return plan
    trace = Trace(module, inputs)
    pairs = list_pairs(trace)
    if patterns is not None:
        attributes = _find_attributes(plan.styles, pairs, size)
        return replace(plan, attributes=attributes | _leave_fast_paths(trace.modules, plan.styles))
    styles, attributes = _derive(pairs, trace.modules, _read_own_plan(module), size)
    styles |= {
        name: "heads"
        for name, part in trace.modules.items()
        if isinstance(part, nn.MultiheadAttention) and _can_split("heads", name, part, size)
    }
    styles |= plan.styles
    _drop_torn_ties(module, styles)
    if not styles:
        styles = _find_single(trace, size)
        _drop_torn_ties(module, styles)
    attributes |= _leave_fast_paths(trace.modules, styles)
    if not styles:
        _refuse(module, size)
    return check_plan(module, TensorPlan(complete(module, styles), attributes), size)


def is_derived(module: nn.Module, patterns: Mapping[str, str] | None) -> bool:
    """Return whether the plan of a model can only be known once it runs on a sample."""
    return patterns is None and not any(is_known(part) for part in module.modules())


def _derive(pairs: Sequence[Pair], modules: Mapping[str, nn.Module], own: Mapping[str, Style], size: int) -> _Proved:
    """Return the styles and attributes of all pairs for which some were proved, and those that need no proof."""
    styles: dict[str, Style] = {}
    attributes: dict[str, Mapping[str, Any]] = {}
    found: dict[tuple[Any, ...], _Proved | None] = {}
    for pair in pairs:
        if styles.keys() & {*pair.columns, pair.rows}:
            continue
        if pair.signature not in found:
            found[pair.signature] = _relative(_prove_one(pair, own, size), pair.block, remove=True)
        result = _relative(found[pair.signature], pair.block, remove=False)
        if result is not None:
            styles |= result[0]
            attributes |= result[1]
    for pair in pairs:  # what needs whole activations still shares its matrices
        fallback: dict[str, Style] = {**dict.fromkeys(pair.columns, "gathered_columns"), pair.rows: "sliced_rows"}
        if (
            not styles.keys() & fallback.keys()
            and _fits(pair, fallback, size)
            and _stand_alone(pair.trace, fallback, size)
        ):
            styles |= fallback
    for name, style in own.items():
        is_alone = name not in styles and style in ("gathered_columns", "vocabulary")
        if is_alone and _can_split(style, name, modules[name], size):
            styles[name] = style
    return styles, attributes


def _relative(result: _Proved | None, block: str, *, remove: bool) -> _Proved | None:
    """Return a result with names inside the block, or inside the model again."""
    if result is None:
        return None

    def rename(name: str) -> str:
        return name[len(block) :].lstrip(".") if remove else ".".join(word for word in (block, name) if word)

    styles, attributes = result
    return {rename(n): style for n, style in styles.items()}, {rename(n): seen for n, seen in attributes.items()}


def _prove_one(pair: Pair, own: Mapping[str, Style], size: int) -> _Proved | None:
    """Return the first styles and attributes with which the ranks' parts of a block add up to all of it."""
    for styles in _list_styles(pair, own):
        if _fits(pair, styles, size):
            for attributes in list_attributes(pair, size):
                partial = prove(pair, styles, attributes, size)
                if partial is not None and not find_variation(pair, styles, attributes, size):
                    return {**styles, **dict.fromkeys(partial, "partial")}, attributes
    return None


def _list_styles(pair: Pair, own: Mapping[str, Style]) -> Iterator[dict[str, Style]]:
    names = [*pair.columns, pair.rows]
    if all(own.get(name) in (*COLUMNS, "rows") for name in names) and "gathered_columns" not in map(own.get, names):
        yield {name: own[name] for name in names}
    kinds: list[Style] = ["columns", "columns:3", "columns:2"] if len(pair.columns) == 1 else ["columns"]
    for kind in kinds:
        yield {**dict.fromkeys(pair.columns, kind), pair.rows: "rows"}


def _fits(pair: Pair, styles: Mapping[str, Style], size: int) -> bool:
    return all(_can_split(style, name, pair.trace.modules[name], size) for name, style in styles.items())


def _stand_alone(trace: Trace, styles: Mapping[str, Style], size: int) -> bool:
    return all(prove_alone(trace, name, style, size) for name, style in styles.items())


def _find_single(trace: Trace, size: int) -> dict[str, Style]:
    """Return the styles of maps that share their matrices where none follows another."""
    styles: dict[str, Style] = {}
    for name, _ in trace.linear:
        kinds: tuple[Style, ...] = ("gathered_columns", "sliced_rows")
        for style in kinds:
            if _can_split(style, name, trace.modules[name], size) and prove_alone(trace, name, style, size):
                styles.setdefault(name, style)
    return styles


def _can_split(style: Style, name: str, module: nn.Module, size: int) -> bool:
    try:
        check(style, name, module, size)
    except SettingsError:
        return False
    return True


def _find_attributes(styles: Mapping[str, Style], pairs: Sequence[Pair], size: int) -> dict[str, Mapping[str, Any]]:
    """Return the numbers that the blocks of a user's plan must see divided, where some make a block right."""
    attributes: dict[str, Mapping[str, Any]] = {}
    done: set[str] = set()
    for pair in pairs:
        mine = {name: styles.get(name, "replicate") for name in (*pair.columns, pair.rows)}
        is_split = mine[pair.rows] == "rows" and all(mine[name] in COLUMNS[:3] for name in pair.columns)
        if not is_split or pair.rows in done:
            continue
        for seen in list_attributes(pair, size):
            if prove(pair, mine, seen, size) is not None:
                if when := find_variation(pair, mine, seen, size):
                    where, maps = pair.block or "the model", ", ".join(mine)
                    raise SettingsError(
                        f"a block must compute what the whole one does under the tensor plan, but {where}, whose maps "
                        f"{maps} ranks share, does not {when}; name these maps 'gathered_columns' and 'sliced_rows' "
                        "instead of columns and rows, or leave them out"
                    )
                attributes |= seen
                done.add(pair.rows)
                break
    return attributes


def _leave_fast_paths(modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> dict[str, Mapping[str, Any]]:
    """Return the attributes that keep torch's encoders from reading split weights around the modules they are in."""
    seen: dict[str, Mapping[str, Any]] = {}
    for name, part in modules.items():
        if any(not name or split.startswith(f"{name}.") for split in styles):
            if isinstance(part, nn.TransformerEncoderLayer):
                seen[name] = {"activation_relu_or_gelu": 0}
            elif isinstance(part, nn.TransformerEncoder):
                seen[name] = {"use_nested_tensor": False}
    return seen


def _read_own_plan(module: nn.Module) -> dict[str, Style]:
    """Return the styles that models of the transformers library bring for their modules."""
    own: dict[str, Style] = {}
    for name, part in module.named_modules():
        patterns = vars(part).get("_tp_plan")
        if not isinstance(patterns, Mapping) or any(name.startswith(known) for known in own if known):
            continue
        for child in dict(part.named_modules()):
            for pattern, style in patterns.items():
                if style in TRANSLATIONS and fnmatchcase(child, pattern):
                    own.setdefault(f"{name}.{child}".strip("."), TRANSLATIONS[style])
    return own


def _drop_torn_ties(module: nn.Module, styles: dict[str, Style]) -> None:
    """Leave whole what shares a parameter with a module that is split in another way."""
    holders: dict[int, list[str]] = {}
    for name, part in module.named_modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(name)
    for names in holders.values():
        kinds = {"vocabulary" if styles.get(name) == "gathered_columns" else styles.get(name) for name in names}
        if len(kinds) > 1:
            for name in names:
                styles.pop(name, None)


def _refuse(module: nn.Module, size: int) -> NoReturn:
    linear = [(name, *count_features(part)) for name, part in module.named_modules() if is_linear(part)]
    example = next((name for name, _, number in linear if number % size == 0), "")
    sizes = ", ".join(f"{name} ({inputs} to {outputs})" for name, inputs, outputs in linear[:3])
    advice = "take another layout, such as sharded"
    if example:
        advice = (
            f'say how it is split: tensor_plan={{"{example}": "gathered_columns", ...}} '
            f'(--tensor_plan \'{{"{example}": "gathered_columns"}}\'), or {advice}'
        )
    elif linear:
        advice = f"give its linear maps numbers of features that {size} divides, or {advice}"
    raise SettingsError(
        f"a model must have matrices that tensor({size}) ranks can share, but nothing in this {type(module).__name__} "
        f"was found to be: it has {f'the linear maps {sizes}' if linear else 'no linear maps'}; {advice}"
    )
