"""Overrides of a settings object from the command line: ``--optimizer.learning_rate 3e-4``."""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from paceline.errors import SettingsError, UnknownNameError
from paceline.functions import Function, check_number, find_hint
from paceline.registry import Family, Settings, describe_rule, explain, find_variant, list_variants
from paceline.topology.units import BytesPerSecond

S = TypeVar("S", bound=Settings)

_ALIASES = {
    "accumulate_grad_batches": "num_micro_batches",
    "amp": "precision",
    "batch": "global_batch",
    "batch_size": "global_batch",
    "beta": "betas",
    "bs": "global_batch",
    "clip": "clip_norm",
    "compile": "compiler",
    "criterion": "loss",
    "depth": "num_layers",
    "dtype": "precision",
    "early_stopping_patience": "stop_after",
    "ema_decay": "ema",
    "epochs": "num_epochs",
    "eps": "epsilon",
    "eval_steps": "evaluate_interval",
    "eval_interval": "evaluate_interval",
    "grad_accum": "num_micro_batches",
    "grad_clip": "clip_norm",
    "gradient_accumulation_steps": "num_micro_batches",
    "gradient_clip_val": "clip_norm",
    "heads": "num_heads",
    "hidden_size": "width",
    "iterations": "num_steps",
    "layers": "num_layers",
    "lr": "learning_rate",
    "lr_scheduler": "schedule",
    "max_epochs": "num_epochs",
    "max_grad_norm": "clip_norm",
    "max_steps": "num_steps",
    "objective": "loss",
    "opt": "optimizer",
    "patience": "stop_after",
    "random_seed": "seed",
    "save_interval": "checkpoint_interval",
    "save_steps": "checkpoint_interval",
    "scheduler": "schedule",
    "seq_len": "sequence_length",
    "steps": "num_steps",
    "warmup": "warmup_steps",
    "wd": "weight_decay",
}
"""Settings by their names in other trainers; some names stand for two."""


class _NoValue(str):
    """The value of an option that was given none; whether there is such an option is known later."""


_NO_VALUE = _NoValue()


def parse_pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return (dotted path, value) of each ``--path value`` or ``--path=value``, for `apply_overrides`.

    Raises:
        SettingsError: An argument is no option.
    """
    pairs = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise SettingsError(
                f"an override must look like --field value, but got {word!r}; see `paceline train --help`"
            )
        path, separator, value = word[2:].partition("=")
        if not separator:
            value = _NO_VALUE if not waiting or waiting[0].startswith("--") else waiting.pop(0)
        pairs.append((path.replace("-", "_"), value))
    return pairs


def apply_overrides(settings: S, pairs: Iterable[tuple[str, str]]) -> S:
    """Return `settings` with each (dotted path, value) applied, and validated again.

    The value of a field with variants is a variant's name; the variant's own fields follow after a dot. Fields that
    neither `settings` nor an override was given keep their defaults, which may follow from other fields.

    Raises:
        SettingsError: A field does not exist, or a value is missing or does not fit its type.
    """
    document, given = settings.model_dump(), set(settings.model_fields_set)
    # A variant is chosen before its fields are set, and before an unknown name is looked up among them, in whatever
    # order they were written.
    known = type(settings).model_fields
    for path, value in sorted(pairs, key=lambda pair: (pair[0].partition(".")[0] not in known, pair[0].count("."))):
        try:
            if value is _NO_VALUE:
                _refuse_no_value(path, _list_paths(type(settings), document))
            _set(type(settings), document, path.split("."), path, value)
        except KeyError:
            raise _unknown(path, value, type(settings), document) from None
        given.add(path.partition(".")[0])
        if "." not in path:  # fields of variants come later, and are those of the variants that will be there
            derived = type(settings).derive_defaults(document)
            document |= {name: _to_document(default) for name, default in derived.items() if name not in given}
    try:
        return type(settings).model_validate({name: value for name, value in document.items() if name in given})
    except ValidationError as error:
        raise SettingsError(explain(error)) from error


def _refuse_no_value(path: str, known: Iterable[str]) -> NoReturn:
    if path not in known:
        raise KeyError(path)
    raise SettingsError(f"--{path} must have a value, but none follows; write --{path} VALUE")


def _set(cls: type[Settings], document: dict[str, Any], parts: list[str], path: str, value: str) -> None:
    """Set a value.

    Raises:
        KeyError: There is no field of that path.
    """
    name, *rest = parts
    field = cls.model_fields[name]
    if not rest:
        parsed = _parse(field, path, value, document.get(name))
        document[name] = _to_document(parsed)
        return
    default = field.get_default(call_default_factory=True, validated_data={})
    child = document.setdefault(name, _to_document(default))
    child_class = settings_class(field)
    if child is None and child_class is not None and not issubclass(child_class, Family | Function):
        child = document[name] = {}  # the first of some settings that may be left out as a whole
    if child_class is not None and isinstance(child, dict):
        if issubclass(child_class, Family):
            child_class = find_variant(child_class, child["name"])
        _set(child_class, child, rest, path, value)
    elif isinstance(child, dict) and len(rest) == 1:
        hint = find_hint(document["path"], rest[0]) if issubclass(cls, Function) and "path" in document else None
        hint = BytesPerSecond if BytesPerSecond in get_args(field.annotation) else hint
        given = _from_json(value) if hint is None else to_jsonable_python(_validate(hint, path, value))
        document[name] = {**child, rest[0]: given}
    else:
        raise SettingsError(f"--{path} must name a field, but {name} has no fields of its own; give --{name} a value")


def _to_document(value: Any) -> Any:
    return value.model_dump() if isinstance(value, Settings) else value


def _list_paths(cls: type[Settings], document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all fields, including those of the chosen variants."""
    for name, field in cls.model_fields.items():
        yield prefix + name
        child, child_class = document.get(name), settings_class(field)
        if not isinstance(child, dict):
            continue
        if child_class is None:
            yield from (f"{prefix}{name}.{key}" for key in child)
        else:
            chosen = find_variant(child_class, child["name"]) if issubclass(child_class, Family) else child_class
            yield from _list_paths(chosen, child, f"{prefix}{name}.")
            if issubclass(chosen, Function):
                yield from (f"{prefix}{name}.arguments.{key}" for key in chosen(**child).list_arguments())


def _unknown(path: str, value: str, cls: type[Settings], document: Mapping[str, Any]) -> UnknownNameError:
    """Return the error for an unknown path, with the paths that may be meant."""
    known = list(_list_paths(cls, document))
    parent, _, name = path.rpartition(".")
    if name == "name" and parent in known:  # as in the files of runs
        return UnknownNameError(f"--{path} must be given as --{parent}, without .name; write --{parent} {value}")
    by_name: dict[str, list[str]] = {}
    for one in known:
        by_name.setdefault(one.rpartition(".")[2], []).append(one)
    wanted = (name, *_ALIASES.get(name, "").split())
    meant = [f"--{one}" for each in wanted for one in by_name.get(each, [])]
    meant = meant or [text for each in wanted for text in _find_in_variants(cls, document, parent, each)]
    if not meant:
        close = difflib.get_close_matches(name, by_name, n=2, cutoff=0.7)
        meant = [f"--{one}" for each in close for one in by_name[each]]
    if meant:
        hint = f"did you mean {' or '.join(dict.fromkeys(meant))}?"
    else:
        is_parent_known = any(one.startswith(f"{parent}.") for one in known)
        beside = [one for one in known if one.rpartition(".")[0] == (parent if is_parent_known else "")]
        hint = f"there are: {', '.join(f'--{one}' for one in beside)}"
    return UnknownNameError(f"--{path} must be the path of a setting, but there is none of that name; {hint}")


def _find_in_variants(cls: type[Settings], document: Mapping[str, Any], parent: str, name: str) -> Iterator[str]:
    """Yield the paths of a name, below `parent` if that is a field, in variants other than the chosen ones."""
    fields = [parent] if parent in cls.model_fields else [field for field in cls.model_fields if document.get(field)]
    for field in fields:
        family = settings_class(cls.model_fields[field])
        if family is not None and issubclass(family, Family):
            variants = [one for one, variant in list_variants(family).items() if name in variant.model_fields]
            if variants:
                yield f"--{field}.{name}, of --{field} {', '.join(variants)}"


def _parse(field: FieldInfo, path: str, value: str, present: Any) -> Any:
    family = settings_class(field)
    if family is not None and issubclass(family, Family):
        if ":" in value and "function" in list_variants(family):
            return {"name": "function", "path": value}
        find_variant(family, value)
        is_present = isinstance(present, dict) and present.get("name") == value
        return present if is_present else {"name": value}
    item = next(iter(get_args(field.annotation)), None) if get_origin(field.annotation) is tuple else None
    if isinstance(item, type) and issubclass(item, Settings) and isinstance(_from_json(value), str):
        return _validate(field.annotation, path, [value])  # one of them, without brackets
    return _validate(field.annotation or str, path, value)


def _validate(annotation: Any, path: str, value: str | list[str]) -> Any:
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    # "none" means none for every field that allows none, also for text.
    candidates: tuple[Any, ...] = (value,)
    if isinstance(value, str):
        candidates = (None, value) if value.lower() == "none" else (value, _from_json(value))
        if BytesPerSecond in (annotation, *get_args(annotation)):  # a number of bytes/s goes into JSON only
            candidates = tuple(candidate for candidate in candidates if isinstance(candidate, str | None))
    refused = None
    for candidate in candidates:
        try:
            taken = adapter.validate_python(candidate)
            check_number(f"--{path}", candidate, taken)
            return taken
        except ValidationError as error:
            is_vague = isinstance(candidate, str | None) or error.errors()[0]["type"] == "missing"
            refused = refused if refused and is_vague else error
    assert refused is not None
    problems = refused.errors()
    deepest = [problem for problem in problems if len(problem["loc"]) == max(len(one["loc"]) for one in problems)]
    own = [describe_rule(problem) for problem in deepest if problem["type"] == "value_error"]
    if len(problems) > 1 and not own:  # one of each type that the field may have
        rules = " or ".join(dict.fromkeys(map(describe_rule, deepest)))
        raise SettingsError(f"--{path} must be {rules}, but got {deepest[0]['input']!r}")
    if len(problems) > 1 and own[0].startswith("must "):
        raise SettingsError(f"--{path} {own[0]}")
    lines = (re.sub(r"^(settings|\d+: )", "", line) for line in explain(refused).splitlines())
    # A pydantic rule begins with " must be"; one of Paceline's is a whole sentence.
    raise SettingsError("\n".join(f"--{path}{line if line.startswith(' ') else f': {line}'}" for line in lines))


def _from_json(value: str) -> Any:
    if value.lower() == "none":
        return None
    try:
        return json.loads(value)
    except ValueError:
        return value


def settings_class(field: FieldInfo) -> type[Settings] | None:
    """Return the settings class of a field; None if it has none, or any number of settings, given as JSON."""
    is_choice = get_origin(field.annotation) in (Union, UnionType)
    candidates = get_args(field.annotation) if is_choice else (field.annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Settings)), None)
