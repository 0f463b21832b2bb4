"""Blocks that can be gathered by themselves, by what a model does on a sample."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from paceline.data.batch import call, list_tensors, map_tensors
from paceline.parallel.fully_sharded import find_blocks
from paceline.parallel.mesh import Mesh
from paceline.parallel.trial import restored, training, vary


def agree_on_blocks(module: nn.Module, sample: Any, mesh: Mesh) -> list[str]:
    """Return the names of the blocks that are gathered by themselves, which rank 0 finds; every rank calls it.

    They are those of `find_blocks`, but not what on the sample somebody else reads the parameters of, and no lists of
    which it leaves children out, such as experts: other ranks would gather others. Without a sample, or where the
    model does not run on it, nothing is known of that.
    """
    names = find_blocks(module)
    kept = list(names)
    if names and mesh.world.rank == 0 and list_tensors(sample):
        kept = _find_kept(module, names, sample)
    told: list[list[str]] = mesh.world.gather_documents(kept, name="blocks that are gathered")
    return told[0]


def _find_kept(module: nn.Module, names: Sequence[str], sample: Any) -> list[str]:
    device = next(module.parameters()).device
    sample = map_tensors(lambda tensor: tensor.to(device), sample)
    dropped: set[str] = set()
    for one in (sample, vary(sample) if device.type != "meta" else None):
        use = _BlockUse(module, names)
        try:
            with restored(module), training(module), torch.no_grad(), use.watching():
                call(module, map_tensors(torch.clone, one))
        except Exception:  # of a model that takes other inputs, or asks for values that are not made yet
            continue
        lists = {name.rpartition(".")[0] for name in set(names) - use.called}
        dropped |= use.read_outside | {name for name in names if name.rpartition(".")[0] in lists}
    return [name for name in names if name not in dropped]


class _BlockUse(TorchFunctionMode):
    """Mode that notes which blocks a forward calls, and whose parameters it reads outside of them."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.called: set[str] = set()
        self.read_outside: set[str] = set()
        self._blocks = {name: module.get_submodule(name) for name in names}
        self._owners = {id(held): name for name, block in self._blocks.items() for held in block.parameters()}
        self._running: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        result = func(*args, **(kwargs or {}))
        if any(isinstance(value, Tensor) for value in tree_leaves(result)):  # else it asks for a shape or a dtype
            owners = {self._owners.get(id(value)) for value in tree_leaves((args, kwargs))}
            self.read_outside |= {name for name in owners if name is not None and name not in self._running}
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While active, runs of the model are watched."""
        with ExitStack() as stack:
            for name, block in self._blocks.items():

                def enter(*_: Any, name: str = name) -> None:
                    self.called.add(name)
                    self._running.append(name)

                def leave(*_: Any) -> None:
                    self._running.pop()

                stack.callback(block.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(block.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(self)
            yield
