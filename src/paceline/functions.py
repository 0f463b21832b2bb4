"""Layer 0: functions of the user's as settings: found by path, with arguments that fit their signature.

A settings field that takes a function stores its path, ``package.module:function`` or ``file.py:function``, so that a
saved run finds it again in another process. If a family of settings takes functions, it has a variant that derives
from `Function` too and is registered as ``"function"``.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, JsonValue, TypeAdapter, ValidationError, ValidationInfo, field_validator, model_validator

from paceline.errors import SettingsError, unknown_name
from paceline.registry import Settings, explain

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Argument(NamedTuple):
    """An argument of a function."""

    value: Any
    """Value of the argument; None if unknown."""
    hint: Any
    """Type of the argument, as far as JSON can represent it; None if unknown."""
    is_missing: bool
    """Whether the argument is required, and was not given."""


class Function(Settings):
    """A function, or class, at the top of a module, with its keyword arguments.

    In Python, pass the function itself, or a `functools.partial` of it. Its keyword arguments are values that JSON can
    represent, or again functions at the top of a module.
    """

    given: ClassVar[tuple[str, ...]] = ()
    """Positional arguments of each call, in the words of errors."""
    offered: ClassVar[tuple[str, ...]] = ()
    """Names of additional arguments, passed if the function has such parameters."""
    returned: ClassVar[str] = ""
    """Path of the class of what the function returns; empty for any."""

    path: str
    """Path of the function: ``package.module:function`` or ``file.py:function``."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of each call. One that is a function is stored as its path: ``{"$function": path}``."""

    @model_validator(mode="before")
    @classmethod
    def _accept_callable(cls, value: Any) -> Any:
        if isinstance(value, str) or (callable(value) and not isinstance(value, Settings)):
            value = {"path": value}
        if not isinstance(value, Mapping) or "path" not in value:
            return value
        if not callable(function := value["path"]):
            return {**value, "path": cls._find(function)} if isinstance(function, str) else value
        arguments = dict(value.get("arguments") or {})
        while isinstance(function, functools.partial):
            if function.args:
                raise SettingsError(
                    f"a partial in a run must have keyword arguments only, but got {function.args} for "
                    f"{_describe(function.func)}; name them"
                )
            arguments = function.keywords | arguments
            function = function.func
        return {**value, "path": cls._find(name_function(function)), "arguments": arguments}

    @classmethod
    def _find(cls, path: str) -> str:
        """Return the path, with that of its file as an absolute one, of a function that takes what it is given."""
        kind = _find_class(cls.returned) if cls.returned else None
        function = find_function(path, kind)
        parameters = _list_parameters(function)
        if kind is not None and isinstance(function, type):
            _check_class(path, function, kind)
        places = sum(parameter.kind in _BY_POSITION for parameter in parameters.values())
        takes_any = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters.values())
        if parameters is not _UNKNOWN and places < len(cls.given) and not takes_any:
            raise SettingsError(
                f"{path} must take {' and '.join(cls.given)} as its first {len(cls.given)} parameters, but has "
                f"{places}: ({', '.join(parameters)})"
            )
        place, _, name = path.rpartition(":")
        return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else path

    @field_validator("arguments", mode="before")
    @classmethod
    def _name_functions(cls, arguments: Any) -> Any:
        return _encode(arguments)

    @field_validator("arguments")
    @classmethod
    def _must_fit(cls, arguments: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        if "path" not in info.data:  # it was no text
            return arguments
        parameters = cls._list_open(info.data["path"])
        return {name: _check(info.data["path"], parameters, name, value) for name, value in arguments.items()}

    def check_complete(self, field: str) -> None:
        """Refuse a function without one of its required arguments.

        Args:
            field: Name of the field in the run, for the message.

        Raises:
            SettingsError: An argument is missing; the message names it.
        """
        for name, argument in self.list_arguments().items():
            if argument.is_missing:
                raise SettingsError(
                    f"{self.path} must be given all arguments that have no default, but {name!r} is missing; give "
                    f"--{field}.arguments.{name}"
                )

    def list_arguments(self) -> dict[str, "Argument"]:
        """Return the possible arguments, by name."""
        hints = _hints(find_function(self.path))
        return {
            name: Argument(
                self.arguments.get(name, None if parameter.default is parameter.empty else parameter.default),
                hints.get(name),
                parameter.default is parameter.empty and name not in self.arguments,
            )
            for name, parameter in self._list_open(self.path).items()
            if parameter.kind in _NAMED and (name in self.arguments or name not in self.offered)
        }

    @property
    def first_parameter(self) -> str:
        """Name of the function's first parameter; empty if it has none, `UNKNOWN_NAME` if its signature is unknown."""
        return next(iter(_list_parameters(find_function(self.path))), "")

    def call(self, *given: Any, **offered: Any) -> Any:
        """Call the function.

        Args:
            given: Positional arguments, always passed.
            offered: Keyword arguments, passed if the function has a parameter of that name, and no argument for it.
        """
        function, arguments = _prepare(self.path, json.dumps(self.arguments))
        taken = {name: value for name, value in offered.items() if name in self._list_open(self.path)}
        return function(*given, **(taken | arguments))

    def make(self, *given: Any, **offered: Any) -> Any:
        """Call the function for an object that is made once, before training.

        Args:
            given: See `call`.
            offered: See `call`.

        Raises:
            SettingsError: The arguments are refused: a class raises TypeError or ValueError, or a function that was
                given some raises ValueError.
        """
        try:
            return self.call(*given, **offered)
        except (TypeError, ValueError) as error:
            is_class = isinstance(find_function(self.path), type)
            if not is_class and (isinstance(error, TypeError) or not self.arguments):  # an error of the function's own
                raise
            found = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items()) or "none"
            raise SettingsError(
                f"arguments of {self.path} must be ones that it accepts, but got {found}: {error}; change them"
            ) from error

    @classmethod
    def _list_open(cls, path: str) -> dict[str, inspect.Parameter]:
        """Return the parameters without positional arguments."""
        names, num_given = {}, len(cls.given)
        for name, parameter in _list_parameters(find_function(path)).items():
            if parameter.kind in _BY_POSITION and num_given:
                num_given -= 1
            else:
                names[name] = parameter
        return names


def find_hint(path: str, argument: str) -> Any:
    """Return the type of an argument of the function at `path`, as far as JSON can represent it; None if unknown."""
    return _hints(find_function(path)).get(argument)


def find_function(path: str, kind: type | None = None) -> Callable[..., Any]:
    """Return the function at ``package.module:function`` or ``file.py:function``.

    Args:
        path: Path of the function, or of a class.
        kind: Base of the classes that the error proposes; None for those that the module defines.

    Raises:
        SettingsError: There is no such file, module or function.
    """
    place, separator, name = path.rpartition(":")
    if not separator or not place or not name:
        raise SettingsError(f"a function must be named as module:function or file.py:function, but got {path!r}")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    function = getattr(module, name, None)
    if not callable(function):
        names = _list_callables(module, kind)
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        what = "function" if kind is None else "class"
        raise SettingsError(f"{place} must define the {what} {name!r}, but it has: {', '.join(names) or 'none'}{hint}")
    return function  # type: ignore[no-any-return]


def _list_callables(module: ModuleType, kind: type | None) -> list[str]:
    """Return the names of a module's functions, and of its classes that derive from `kind`."""
    public = {name: item for name, item in vars(module).items() if name[0] != "_"}
    classes = {name: item for name, item in public.items() if isinstance(item, type) and item is not kind}
    if kind is not None:
        fitting = [name for name, item in classes.items() if issubclass(item, kind)]
    else:
        fitting = [name for name, item in classes.items() if item.__module__ == module.__name__]
    return [name for name, item in public.items() if inspect.isfunction(item)] + fitting


def _find_class(path: str) -> type:
    found = find_function(path)
    assert isinstance(found, type)
    return found


def _check_class(path: str, found: type, kind: type) -> None:
    """Refuse a class that is no `kind`, or that is made of objects of that kind, which no setting can give it."""
    if not issubclass(found, kind):
        raise SettingsError(
            f"{path} must be a function or class that returns a torch {kind.__name__}, but the class "
            f"{found.__name__} is none; give one that is, or write a function"
        )
    for name, parameter in _list_parameters(found).items():
        is_required = parameter.default is parameter.empty
        if is_required and re.search(rf"\b{kind.__name__}\b", str(parameter.annotation)):
            raise SettingsError(
                f"{path} must be called by a function of yours, since no setting can give it {name!r}, which takes "
                f"objects of {kind.__name__}; write a function that makes them and returns the {found.__name__}"
            )


def name_function(function: Callable[..., Any]) -> str:
    """Return the path under which `find_function` finds a module-level `function` in another process."""
    name, place = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if name is None or place is None:
        raise SettingsError(
            f"a function in a run must be one that a module defines, but got {_describe(function)}; define one with "
            "def that calls or returns it"
        )
    if "." in name or name == "<lambda>":
        raise SettingsError(f"a function in a run must stand at the top of a module, but got {name}; move it there")
    module = sys.modules[place]
    if getattr(module, name, None) is not function:
        raise SettingsError(
            f"a function in a run must stand at the top of a module under its own name, but got {name} of {place}; "
            "define it there with def"
        )
    file = getattr(module, "__file__", None)
    is_script = place == "__main__" or place in _LOADED
    return f"{Path(file).resolve()}:{name}" if is_script and file else f"{place}:{name}"


UNKNOWN_NAME = "*"
"""Name that stands for the parameters of a function without signature."""
_UNKNOWN: dict[str, inspect.Parameter] = {UNKNOWN_NAME: inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}
"""Parameters of a function without signature: any argument is allowed."""


def _list_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return _UNKNOWN


def _check(path: str, parameters: Mapping[str, inspect.Parameter], name: str, value: JsonValue) -> JsonValue:
    """Return an argument's value in the type of its annotation, as JSON."""
    named = {key for key, parameter in parameters.items() if parameter.kind in _NAMED}
    if name not in named and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        raise unknown_name(f"an argument of {path}", name, named)
    hint = find_hint(path, name)
    if hint is None or _has_function(value):
        return value
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        plain: JsonValue = adapter.dump_python(adapter.validate_python(value), mode="json")
    except ValidationError as error:
        raise SettingsError(f"{name} of {path}{explain(error).splitlines()[0].removeprefix('settings')}") from error
    check_number(f"{name} of {path}", value, plain)
    return plain


def check_number(name: str, given: object, taken: object) -> None:
    """Refuse a boolean that would be taken for a number, which hides a mistake.

    Args:
        name: Name of the value, for the message.
        given: Value that was given.
        taken: The argument, converted to its type.

    Raises:
        SettingsError: A boolean became a number.
    """
    if isinstance(given, bool) and isinstance(taken, int | float) and not isinstance(taken, bool):
        raise SettingsError(f"{name} must be a number, but got {given}")


@functools.lru_cache
def _prepare(path: str, arguments: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a function, and its arguments in the types of their annotations."""
    function = find_function(path)
    hints = _hints(function)
    values = {}
    for name, value in json.loads(arguments).items():
        is_typed = name in hints and not _has_function(value)
        values[name] = TypeAdapter(hints[name]).validate_python(value) if is_typed else _decode(value)
    return function, values


_FUNCTION = "$function"
"""Key of the path of a function that is an argument of another."""


def _encode(value: Any) -> Any:
    """Return an argument with the paths of functions in their place."""
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        if _FUNCTION not in value:
            return {name: _encode(item) for name, item in value.items()}
        value = {"path": value[_FUNCTION], "arguments": value.get("arguments", {})}
    elif not callable(value):
        return value
    function = Function.model_validate(value)
    arguments = {"arguments": function.arguments} if function.arguments else {}
    return {_FUNCTION: function.path, **arguments}


def _decode(value: Any) -> Any:
    """Return an argument with functions in the place of their paths."""
    if isinstance(value, dict) and _FUNCTION in value:
        function, arguments = _prepare(value[_FUNCTION], json.dumps(value.get("arguments", {})))
        return functools.partial(function, **arguments) if arguments else function
    if isinstance(value, dict):
        return {name: _decode(item) for name, item in value.items()}
    return [_decode(item) for item in value] if isinstance(value, list) else value


def _has_function(value: JsonValue) -> bool:
    if isinstance(value, dict):
        return _FUNCTION in value or any(map(_has_function, value.values()))
    return isinstance(value, list) and any(map(_has_function, value))


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of parameters that JSON can represent; of unions, the members that it can."""
    try:
        hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    except (TypeError, NameError):  # an annotation that means nothing at run time
        return {}
    return {name: simple for name, hint in hints.items() if (simple := _simplify(hint)) is not None}


def _simplify(hint: Any) -> Any:
    """Return the part of an annotation that JSON can represent; None if there is none."""
    if hint in (bool, int, float, str):
        return hint
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return hint
    if origin in (typing.Union, types.UnionType):
        known = [simple for each in inner if (simple := _simplify(each)) is not None]
        has_none = types.NoneType in inner
        return functools.reduce(operator.or_, known, None if has_none else known[0]) if known else None
    if origin in (list, tuple, dict):
        parts = [each if each is Ellipsis else _simplify(each) for each in inner]
        return None if None in parts else origin[tuple(parts)]
    return None


def _describe(function: object) -> str:
    return getattr(function, "__qualname__", None) or f"an object of {type(function).__qualname__}"


_LOADED: set[str] = set()
"""Names of the modules that are the user's files."""


def _import(place: str) -> ModuleType:
    if not all(part.isidentifier() for part in place.split(".")):
        raise SettingsError(f"a module must have a name like package.module, but got {place!r}; check it")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not place.startswith(error.name):
            raise
        raise SettingsError(f"module {place!r} must be importable, but {error}; check its name") from error


def _load_file(file: Path) -> ModuleType:
    file = file.resolve()
    if not file.is_file():
        raise SettingsError(f"the file of a function must exist, but got {file}; check the path")
    name = _name_module(file)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _LOADED.add(name)
    sys.path.insert(0, str(file.parent))  # so that the file may import its neighbours, as a script may
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _name_module(file: Path) -> str:
    """Return the module name that `import` uses, which other processes know too; a unique one if it is taken."""
    present = sys.modules.get(file.stem)
    if "." not in file.stem and (present is None or getattr(present, "__file__", None) == str(file)):
        return file.stem
    return f"{file.stem.replace('.', '_')}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
