"""State of a model, an optimizer or any object with a `state_dict` as named tensors and JSON, and back."""

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.checkpoint import SavedState
from paceline.comm.group import Group
from paceline.errors import CheckpointError, SettingsError
from paceline.replica.gathering import FORMAT, read_header, scatter, split_name

Document = dict[str, Any]


class Stateful(Protocol):
    """An object that can be saved and loaded: a learning-rate schedule, a loader, a moving average of parameters."""

    def state_dict(self) -> Any:
        """Return tensors and plain values, in dicts, lists and tuples."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state that `state_dict` returned."""


def capture_objects(objects: Mapping[str, Stateful]) -> tuple[dict[str, Tensor], Document]:
    """Return the tensors and the document of objects, by name, to be joined to `paceline.replica.state.capture`'s.

    Only rank 0's state is saved.

    Raises:
        SettingsError: A state contains other objects than tensors and plain values.
    """
    tensors: dict[str, Tensor] = {}
    document = {name: _split(f"objects/{name}", thing.state_dict(), tensors) for name, thing in objects.items()}
    return tensors, {"format": FORMAT, "objects": document}


def restore_objects(
    checkpoint: SavedState | None, objects: Mapping[str, Stateful], world: Group, *, all_saved: bool = False
) -> bool:
    """Load rank 0's `checkpoint` into the objects of every rank, and return whether there is one.

    Args:
        checkpoint: The checkpoint, on rank 0.
        objects: Objects by the names that they were saved under.
        world: All ranks.
        all_saved: Whether all objects in the checkpoint must be given.

    Raises:
        CheckpointError: The checkpoint lacks one of the objects, holds others that are not given, or is of another
            version of Paceline.
    """
    header = read_header(checkpoint, world)
    if header is None:
        return False
    document, tensors = header
    saved = document.get("objects", {})
    if missing := [name for name in objects if name not in saved]:
        raise CheckpointError(
            f"objects must have names that they were saved under, but {missing[0]!r} is none of "
            f"{', '.join(map(repr, saved)) or 'them, as there are none'}; give it one of these"
        )
    if all_saved and (left := [name for name in saved if name not in objects]):
        raise CheckpointError(
            f"all objects of a checkpoint must be loaded, but {', '.join(map(repr, left))} was saved and not given; "
            "give load_latest the same objects as save, in the same order"
        )
    prefixes = tuple(f"objects/{name}/" for name in objects)
    wanted = {name: whole for name, whole in tensors.items() if f"{name}/".startswith(prefixes)}
    loaded = dict(scatter(wanted, checkpoint.read if checkpoint is not None else None, world))
    for name, thing in objects.items():
        thing.load_state_dict(_join(saved[name], loaded))
    return True


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters (a tied one once) and persistent buffers, by name."""
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return {name: parameter.detach() for name, parameter in module.named_parameters()} | buffers


def list_ties(module: nn.Module) -> dict[str, str]:
    """Return the names of tied tensors that `model_tensors` omits, with the names that it has for them."""
    names: dict[int, str] = {}
    tensors = {n: tensor for n, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    return {n: first for n, tensor in tensors.items() if (first := names.setdefault(id(tensor), n)) != n}


def optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the optimizer's tensors, and its other state of each parameter."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    names = _names_by_index(module, optimizer)
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{names[index]}/{key}"] = value
            else:
                scalars.setdefault(names[index], {})[key] = value
    return tensors, scalars


def _names_by_index(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the name of the optimizer's i-th parameter at place i."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def load_optimizer(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Mapping[str, Any]],
) -> None:
    """Load the state of this rank's parameters; hyper-parameters stay those of the run's settings."""
    by_parameter: dict[str, dict[str, Any]] = {name: dict(state) for name, state in scalars.items()}
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
            by_parameter.setdefault(parameter, {})[key] = tensor
    indices = {name: index for index, name in enumerate(_names_by_index(module, optimizer))}
    state = {indices[name]: values for name, values in by_parameter.items() if name in indices}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def check_trained(module: nn.Module, optimizer: torch.optim.Optimizer, saved: Iterable[str], world: Group) -> None:
    """Refuse, on all ranks alike, to drop the optimizer's state of a parameter that is frozen here.

    Args:
        module: The model.
        optimizer: Optimizer; what it holds keeps its state, frozen or not.
        saved: Names of the optimizer's saved tensors.
        world: All ranks.

    Raises:
        SettingsError: There is such a parameter.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad and id(p) not in held]
    everybody = world.gather_documents(frozen, name="frozen parameters")
    lost = {name for names in everybody for name in names} & {split_name(name)[1] for name in saved}
    if lost:
        raise SettingsError(
            f"what the checkpoint trained must be in the optimizer, where it keeps its state, but {min(lost)} "
            "is frozen and in no parameter group; give the optimizer all parameters, frozen ones too, or train it"
        )


def list_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each group of parameters: numbers, words, and lists of them."""
    groups = [{k: v.tolist() if isinstance(v, Tensor) else v for k, v in g.items()} for g in optimizer.param_groups]
    plain = (bool, int, float, str, NoneType)
    return [
        {
            key: value
            for key, value in group.items()
            if isinstance(value, plain)
            or (isinstance(value, list | tuple) and all(isinstance(v, plain) for v in value))
        }
        for group in groups
    ]


def load_settings(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Load hyper-parameters.

    Raises:
        SettingsError: The saved optimizer has another number of groups.
    """
    if len(saved) != len(optimizer.param_groups):
        raise SettingsError(
            f"the optimizer must have the checkpoint's {len(saved)} groups of parameters, but got "
            f"{len(optimizer.param_groups)}; build it as it was built then"
        )
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        for key, value in settings.items():
            here = group.get(key)
            if isinstance(here, Tensor):
                here.copy_(torch.tensor(value))
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _split(path: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, and add its tensors to `tensors`, by their paths in the value."""
    if isinstance(value, Tensor):
        assert path not in tensors, f"two tensors must not both be {path}"
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {"dict": [[key, _split(f"{path}/{key}", inner, tensors)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_split(f"{path}/{place}", inner, tensors) for place, inner in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise SettingsError(
        f"a state must be made of tensors, numbers, strings, lists, tuples and dicts by name or number, but {path} is "
        f"a {type(value).__name__}; leave it out of state_dict, or make it one of these"
    )


def _join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `_split` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _join(inner, tensors) for key, inner in content}
    joined = [_join(inner, tensors) for inner in content]
    return tuple(joined) if kind == "tuple" else joined
