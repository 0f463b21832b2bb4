"""Layer 0: settings objects, told apart by name, to and from JSON.

Everything a person can choose is a frozen pydantic model. A *family* is an abstract settings class
(synchronisation rules, optimizers, ...); its variants are registered under a name, and a field whose type is the
family accepts a variant, its name, or a mapping with a ``name`` key:

    >>> class Shape(Family):
    ...     family = "shape"
    >>> @register("circle")
    ... class Circle(Shape):
    ...     radius: float = 1.0
    >>> Shape.model_validate({"name": "circle", "radius": 2}).model_dump()
    {'name': 'circle', 'radius': 2.0}
"""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from paceline.errors import SettingsError, unknown_name


class Settings(BaseModel):
    """A frozen, keyword-only settings object: an unknown key is an error, and state is kept elsewhere."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _know_the_fields(cls, value: Any) -> Any:
        unknown = [key for key in value if key not in cls.model_fields] if isinstance(value, Mapping) else []
        if unknown:
            raise unknown_name(f"a field of {cls.__name__}", str(unknown[0]), cls.model_fields)
        return value

    @classmethod
    def derive_defaults(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults that follow from the values of other fields, by field; none here."""
        return {}


class Family(Settings):
    """A settings class whose variants are told apart by their registered name.

    A direct subclass is a family and sets ``family`` to the word that errors use for the family.
    """

    name: ClassVar[str] = ""
    """Name that the variant is registered under; empty for a family itself."""
    family: ClassVar[str] = ""
    setting: ClassVar[str] = ""
    """Path of the setting of a run that takes a variant, for who gives it to another; empty where nobody would."""

    @model_validator(mode="wrap")
    @classmethod
    def _choose_variant(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, type) and issubclass(value, cls):
            value = value.name
        if isinstance(value, str) or callable(value):
            is_function = "function" in list_variants(cls) and (callable(value) or ":" in value)
            value = {"name": "function", "path": value} if is_function else {"name": value}
        if not isinstance(value, Mapping):
            if "family" in vars(cls) or inspect.isabstract(cls):
                raise SettingsError(_describe_misfit(cls, value))
            return handler(value)
        fields = {key: item for key, item in value.items() if key != "name"}
        name = value.get("name", cls.name)
        if name == cls.name and name:
            return handler(fields)
        if not name and "family" not in vars(cls) and not inspect.isabstract(cls):
            word = cls.__name__.lower()
            raise SettingsError(f'{cls.__name__} must be registered; put @paceline.register("{word}") before its class')
        return find_variant(cls, str(name)).model_validate(fields)

    @model_serializer(mode="plain")
    def _with_name(self) -> dict[str, Any]:
        fields = {field: getattr(self, field) for field in type(self).model_fields}
        return {"name": self.name, **fields} if self.name else fields


def _describe_misfit(family: type[Family], value: object) -> str:
    """Return what a field of a family must be, for a value that is no settings, name or function."""
    takes_functions = "function" in list_variants(family)
    function = " a function at the top of a module that returns it," if takes_functions else ""
    found = repr(value) if isinstance(value, int | float | None) else f"an object of {type(value).__qualname__}"
    known = ", ".join(list_variants(family))
    advice = "define such a function, and give that" if takes_functions else f"known: {known}"
    return f"{family.family} must be{function} a registered name or settings, but got {found}; {advice}"


_VARIANTS: dict[type[Family], dict[str, type[Family]]] = {}

F = TypeVar("F", bound=Family)


def register(name: str) -> Callable[[type[F]], type[F]]:
    """Register a variant of a family under `name`; nothing else is needed to add it.

    Raises:
        SettingsError: Another class of the family has the name, the class belongs to no family, or it lacks a method.
    """

    def add(variant: type[F]) -> type[F]:
        variants = _VARIANTS.setdefault(_root(variant), {})
        previous = variants.get(name, variant)
        if (previous.__module__, previous.__qualname__) != (variant.__module__, variant.__qualname__):
            raise SettingsError(
                f"{_root(variant).family} name {name!r} must be free, but {previous.__module__}."
                f"{previous.__qualname__} has it; choose another"
            )
        if missing := sorted(getattr(variant, "__abstractmethods__", ())):
            raise SettingsError(
                f"{variant.__qualname__} must define all that its family {_root(variant).family} asks for, but "
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; define it in the class"
            )
        variant.name = name
        variants[name] = variant
        return variant

    return add


def find_variant(family: type[F], name: str) -> type[F]:
    """Return the variant of `family` registered under `name`.

    Raises:
        UnknownNameError: No variant has the name; the message lists the known ones.
        SettingsError: A variant of a wider family has the name.
    """
    variants = list_variants(family)
    if name not in variants and name in list_variants(_root(family)):
        known = ", ".join(variants)
        raise SettingsError(f"{family.family} must be one that serves here, but got {name!r}; known: {known}")
    if name not in variants:
        others = [root for root, known in _VARIANTS.items() if root.setting and name in known and name != "function"]
        hints = [f"{name} is a {root.family}: take {root.setting} (--{root.setting} {name})" for root in others]
        raise unknown_name(_root(family).family, name, variants, "; ".join(hints))
    return variants[name]


def list_variants(family: type[F]) -> dict[str, type[F]]:
    """Return the variants of `family` by name; for a subclass of a family, only those that derive from it."""
    variants = _VARIANTS.get(_root(family), {})
    return {name: variant for name, variant in sorted(variants.items()) if issubclass(variant, family)}


def describe_fields(settings: type[Settings]) -> dict[str, str]:
    """Return the docstring below each field, by the field's name; empty for a field without one.

    The docstrings are read from the source on each call. Pydantic's `use_attribute_docstrings` would read them whenever
    a class is made, which takes as long as the rest of importing Paceline's settings.
    """
    found = dict.fromkeys(settings.model_fields, "")
    for cls in reversed(settings.__mro__):
        if issubclass(cls, Settings):
            found |= {name: text for name, text in _read_field_texts(cls).items() if name in found}
    return found


def _read_field_texts(cls: type[Settings]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # class without a source file
        return {}
    assert isinstance(tree.body[0], ast.ClassDef)
    texts = {}
    for statement, after in itertools.pairwise(tree.body[0].body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = after.value if isinstance(after, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[statement.target.id] = inspect.cleandoc(value.value)
    return texts


def validate(read: Callable[[object], F], given: object, setting: str) -> F:
    """Return settings that are given as such, by their name, or as a mapping.

    Args:
        read: Function that reads them: `model_validate` of their family.
        given: Settings, their name, or a mapping of their fields.
        setting: Name of the argument that takes them, for the message.

    Raises:
        SettingsError: The name is unknown, or a field has a value that cannot work.
    """
    try:
        return read(given)
    except ValidationError as error:
        raise SettingsError(f"{setting}: {explain(error)}") from error


def explain(error: ValidationError) -> str:
    """Return pydantic's error as one line per problem: path, rule, value."""
    return "\n".join(_explain_one(problem) for problem in error.errors())


def _explain_one(problem: Mapping[str, Any]) -> str:
    is_json = problem["type"] == "finite_number" and problem["loc"][-1:] == ("float",)  # pydantic adds the type
    path = ".".join(str(part) for part in problem["loc"][: -1 if is_json else None]) or "settings"
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # of events
        return f"{path} is not a field here"
    if problem["type"] == "missing":
        return f"{path} must be given"
    rule = describe_rule(problem)
    if problem["type"] == "value_error":
        begins_with_name = bool(problem["loc"]) and rule.startswith(f"{problem['loc'][-1]} ")
        return rule if path == "settings" or begins_with_name else f"{path}: {rule}"
    return f"{path} must be {rule}, but got {problem['input']!r}"


def check_whole(name: str, value: object, least: int | None = None, advice: str = "") -> int:
    """Return a whole number.

    Args:
        name: Name of the setting, for the message.
        value: Value of the setting.
        least: Smallest number that is allowed; None for any.
        advice: End of the message, if there is more to say.

    Raises:
        SettingsError: The value is no whole number, or too small.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or (least is not None and value < least):
        rule = "a whole number" if least is None else f"a whole number of at least {least}"
        raise SettingsError(f"{name} must be {rule}, but got {value!r}{advice and '; '}{advice}")
    return int(value)


def describe_rule(problem: Mapping[str, Any]) -> str:
    """Return what a value must be, of a problem in a pydantic error; or the message of an error of Paceline's."""
    if problem["type"] in _RULES:
        return _RULES[problem["type"]]
    rule = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return rule.partition(", unable to parse")[0]


_RULES = {
    "invalid-json-value": "a value that JSON can represent, or a function or class at the top of a module",
    "tuple_type": "a list such as [1, 2]",
    "model_type": "its fields by name, each given by itself as NAME.FIELD, or a mapping of them",
}


def _root(cls: type[Family]) -> type[Family]:
    candidates: Iterable[type] = cls.__mro__
    for candidate in candidates:
        if issubclass(candidate, Family) and "family" in vars(candidate) and candidate is not Family:
            return candidate
    raise SettingsError(f"{cls.__qualname__} must derive from a family, but sets none; derive it from one")
