"""The blocks of a model: its repeated parts, each of which may be computed again in backward."""

from collections.abc import Iterator

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_recomputable(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in their order in it.

    A block is a child of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` that has children of its own and is
    none of these containers; or an `nn.Sequential` in one of them, none of whose children has any. So a transformer's
    layers are blocks and a ResNet's residual blocks, but not each convolution of its stem: to compute a single
    operation again saves next to nothing. No block is inside another.
    """
    return dict(_find(module, ""))


def _find(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    is_container = isinstance(module, _CONTAINERS)
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if is_container and _is_block(child):
            yield name, child
        else:
            yield from _find(child, f"{name}.")


def _is_block(module: nn.Module) -> bool:
    children = list(module.children())
    if isinstance(module, nn.Sequential):
        return len(children) > 1 and not any(list(child.children()) for child in children)
    return len(children) > 0 and not isinstance(module, _CONTAINERS)
