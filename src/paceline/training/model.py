"""The model of a run: settings that build a module once the data is known."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self

from pydantic import Field, JsonValue, ModelWrapValidatorHandler, field_validator, model_validator
from torch import nn

from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.registry import Family, register


class LayerStack(NamedTuple):
    """Where the layers of a model are that can be built with any number of them."""

    num_layers: int
    path: str
    """Name of their `nn.ModuleList`: layer 2's parameters are called ``<path>.2.<rest>``."""
    branch_ends: tuple[str, ...]
    """How names of parameters end that are the last on each branch: with zeros there, a layer hands its input on."""


class Model(Family):
    """Settings of a model. In a `Run`, a plain module-level function that returns a module will do instead."""

    family = "model"

    @model_validator(mode="wrap")
    @classmethod
    def _accept_function(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if inspect.isfunction(value):
            value = {"name": "function", "path": name_function(value)}
        return handler(value)

    @abstractmethod
    def build(self, spec: Spec) -> nn.Module:
        """Return a new module with random weights for data of the given `spec`."""

    @property
    def layer_stack(self) -> LayerStack | None:
        """Its layers, where it can become deeper while it is trained; else None."""
        return None

    def with_depth(self, num_layers: int) -> Self:
        """Return the same settings for another number of layers; only where there is a `layer_stack`."""
        raise AssertionError(f"model {self.name} has no depth")


@register("function")
class FunctionModel(Model):
    """Whatever module a function of the user's returns, unchanged."""

    path: str
    """Where the function is: ``package.module:function`` or ``file.py:function``."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments it is called with."""

    @field_validator("path")
    @classmethod
    def _must_be_found(cls, path: str) -> str:
        find_function(path)
        return path

    def build(self, spec: Spec) -> nn.Module:
        """Call the function; `spec` is left to it to know."""
        module = find_function(self.path)(**self.arguments)
        if not isinstance(module, nn.Module):
            raise SettingsError(f"{self.path} must return a torch.nn.Module, but got {type(module).__name__}")
        return module


def find_function(path: str) -> Callable[..., Any]:
    """Return the function at ``package.module:function`` or ``file.py:function``.

    Raises:
        SettingsError: There is no such file, module or function.
    """
    place, separator, name = path.rpartition(":")
    if not separator or not place or not name:
        raise SettingsError(f"a function must be named as module:function or file.py:function, but got {path!r}")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, item in vars(module).items() if inspect.isfunction(item) and key[0] != "_"]
        raise SettingsError(f"{place} must define the function {name!r}, but it has: {', '.join(names) or 'none'}")
    return function  # type: ignore[no-any-return]


def name_function(function: Callable[..., Any]) -> str:
    """Return the path under which `find_function` finds a module-level `function` in another process."""
    if "." in function.__qualname__:
        raise SettingsError(
            f"a function in a run must stand at the top of a module, but got {function.__qualname__}; move it there"
        )
    module = sys.modules[function.__module__]
    if getattr(module, function.__name__, None) is not function:
        raise SettingsError(
            f"a function in a run must stand at the top of a module under its own name, but got {function.__name__} of "
            f"{function.__module__}; define it there with def"
        )
    file = getattr(module, "__file__", None)
    is_script = function.__module__ == "__main__" or function.__module__ in _LOADED
    return (
        f"{Path(file).resolve()}:{function.__name__}"
        if is_script and file
        else f"{function.__module__}:{function.__name__}"
    )


_LOADED: set[str] = set()
"""Names of the modules that are files of the user's."""


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
    """Return the name that `import` gives it, which other processes know too; one of its own where that is taken."""
    present = sys.modules.get(file.stem)
    if "." not in file.stem and (present is None or getattr(present, "__file__", None) == str(file)):
        return file.stem
    return f"{file.stem.replace('.', '_')}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
