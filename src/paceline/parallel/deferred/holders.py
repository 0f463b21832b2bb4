"""Where a model holds tensors: as parameters, as buffers, and in attributes, also in containers of those."""

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (list, tuple, dict, deque)


def list_held(module: nn.Module) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield the tensors of a model under all their names, with the container of each and the key in it."""
    for name, part in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for held in (part._parameters, part._buffers):
            for key, tensor in list(held.items()):
                if tensor is not None:
                    yield f"{prefix}{key}", held, key, tensor
        yield from list_attributes(part, prefix)


def list_attributes(part: nn.Module, prefix: str) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield the tensors in attributes of a module, beside parameters and buffers, as `list_held` does."""
    attributes = {key: value for key, value in vars(part).items() if key not in ("_parameters", "_buffers", "_modules")}
    for name, container, key, value in _walk(attributes, prefix, set()):
        yield name, vars(part) if container is attributes else container, key, value


def find_stranger(module: nn.Module, concerns: Callable[[Tensor], bool]) -> str:
    """Return the name of a tensor that is reached from elsewhere than a model's modules too, or is in such a container.

    Args:
        module: Model.
        concerns: Whether a tensor counts.
    """
    tensors: dict[int, Any] = {}
    names: dict[int, str] = {}
    expected = Counter[int]()
    seen: set[int] = set()
    for name, _, _, tensor in list_held(module):
        if concerns(tensor):
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), name)
    tensor = None  # type: ignore[assignment]  # which would hold the last one
    containers: dict[int, Any] = {}
    for part in module.modules():
        _count(vars(part), tensors, containers, expected, seen)
    return _find_more_held(tensors, expected, names) or _find_more_held(containers, expected, {})


def _find_more_held(objects: dict[int, Any], expected: Counter[int], names: dict[int, str]) -> str:
    control = [object()]
    objects[id(control)] = control
    counts = {key: sys.getrefcount(held) for key, held in objects.items()}
    del objects[id(control)]
    alone = counts.pop(id(control)) - 1  # the name `control`
    more = next((key for key, count in counts.items() if count - alone > expected[key]), None)
    return "" if more is None else names.get(more, "a container of tensors")


def _count(
    value: Any, tensors: dict[int, Any], containers: dict[int, Any], expected: Counter[int], seen: set[int]
) -> bool:
    """Count how often containers hold tensors and each other; return whether this one holds tensors."""
    found = False
    for one in value.values() if isinstance(value, dict) else value:
        if id(one) in tensors:
            expected[id(one)] += 1
            found = True
        elif isinstance(one, _CONTAINERS):
            expected[id(one)] += 1
            if id(one) not in seen:
                seen.add(id(one))
                if _count(one, tensors, containers, expected, seen):
                    containers[id(one)] = one
            found |= id(one) in containers
    return found


def _walk(container: Any, name: str, above: set[int]) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield the tensors in a container and in those that it holds."""
    above = above | {id(container)}
    items: Iterable[tuple[Any, Any]] = container.items() if isinstance(container, dict) else enumerate(container)
    for place, (key, value) in enumerate(list(items)):
        # By place, since a key may be a tensor, which has no text.
        path = f"{name}{key}" if len(above) == 1 else f"{name}[{place}]"
        if isinstance(value, Tensor):
            yield path, container, key, value
        elif isinstance(value, _CONTAINERS) and id(value) not in above:
            yield from _walk(value, path, above)
