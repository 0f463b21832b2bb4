"""Blocks that can be gathered by themselves, by what a model does on a sample."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from paceline.data.batch import call, list_tensors, map_tensors
from paceline.parallel.fully_sharded import find_blocks
from paceline.parallel.mesh import Mesh
from paceline.parallel.trial import restored, training, vary

_MAX_BRANCHES = 16
"""Number of questions (`if tensor:`) of a forward whose other answer is tried."""
_READS = frozenset(
    [
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "__array__",
        "__format__",
        "__contains__",
        "item",
        "tolist",
        "numpy",
        "is_nonzero",
        "nonzero",
        "argwhere",
        "where",
        "masked_select",
        "unique",
        "unique_consecutive",
        "bincount",
        "equal",
        "allclose",
    ]
)
"""Functions of torch whose result, or its shape, depends on values in more ways than can be tried."""
_NUMBERS = (int, float, complex, str, np.ndarray, np.generic)
"""Types of what a block returns by which a forward can choose without asking a tensor."""


def agree_on_blocks(module: nn.Module, sample: Any, mesh: Mesh) -> tuple[list[str], bool]:
    """Return the names of the blocks that are gathered by themselves, and whether there is a sample: as rank 0 finds.

    They are those of `find_blocks`, but not what on the sample somebody else reads the parameters of, and no lists
    with blocks that the forward calls by choice, such as experts: other ranks would gather others. Both answers of
    each question that the forward asks of values are tried; what is called after it has read numbers is by choice, or
    after a block that did either has handed out Python values.
    Without a sample, or where the model does not run on it, little is known of that.
    """
    names = find_blocks(module)
    kept = list(names)
    has_sample = bool(list_tensors(sample))
    if names and mesh.world.rank == 0 and has_sample:
        kept = _find_kept(module, names, sample)
    told: list[Any] = mesh.world.gather_documents([kept, has_sample], name="blocks that are gathered")
    kept, has_sample = told[0]
    return kept, has_sample


def _find_kept(module: nn.Module, names: Sequence[str], sample: Any) -> list[str]:
    device = next(module.parameters()).device
    sample = map_tensors(lambda tensor: tensor.to(device), sample)
    runs = [_watch(module, names, one) for one in (sample, vary(sample) if device.type != "meta" else None)]
    for number in range(min(runs[0].num_questions, _MAX_BRANCHES)):
        runs.append(_watch(module, names, sample, answered=number))
    read_outside = set().union(*(run.read_outside for run in runs))
    # A run that failed, such as on an answer which never is, tells what came before it alone.
    ended = [run.calls for run in runs if run.has_ended]
    chosen = {name for name in names if len({Counter(calls)[name] for calls in ended}) > 1}
    chosen |= {name for name in names if ended and not any(name in calls for calls in ended)}
    by_values = {name for name in names for run in runs if run.num_certain is not None and run.is_by_values(name)}
    lists = {name.rpartition(".")[0] for name in chosen}
    if unsure := [name for name in names if name in by_values and name.rpartition(".")[0] not in lists]:
        _warn(unsure)
    lists |= {name.rpartition(".")[0] for name in unsure}
    kept = [name for name in names if name not in read_outside and name.rpartition(".")[0] not in lists]
    orders = {tuple(name for name in calls if name in kept) for calls in ended}
    return kept if len(orders) <= 1 else []


def _watch(module: nn.Module, names: Sequence[str], sample: Any, answered: int | None = None) -> "_BlockUse":
    use = _BlockUse(module, names, answered)
    if sample is None:
        return use
    try:
        with restored(module), training(module), torch.no_grad(), use.watching():
            call(module, map_tensors(torch.clone, sample))
        use.has_ended = True
    except Exception:  # of a model that takes other inputs, or asks for values that are not made yet
        use.has_ended = False
    return use


def _warn(names: Sequence[str]) -> None:
    warnings.warn(
        f"the model reads numbers of its tensors (.item(), .tolist(), nonzero, masks, or Python values that a block "
        f"returns) before it calls {names[0]} and others ({len(names)}), so that ranks may call different ones: they "
        "are gathered with the rest of the model, which takes more memory; read numbers after them, or ask with "
        "`if tensor:` outside blocks, whose both answers are tried",
        stacklevel=2,
    )


class _BlockUse(TorchFunctionMode):
    """Mode that notes which blocks a forward calls, what it asks of values, and whose parameters it reads outside.

    Args:
        module: The model.
        names: Names of the blocks.
        answered: Number of the question that gets the other answer.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], answered: int | None = None) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.read_outside: set[str] = set()
        self.num_questions = 0
        self.num_certain: int | None = None
        """Number of calls before the forward read a number; None if it read none."""
        self.has_ended = False
        self._answered = answered
        self._blocks = {name: module.get_submodule(name) for name in names}
        self._owners = {id(held): name for name, block in self._blocks.items() for held in block.parameters()}
        self._running: list[str] = []
        self._has_read_inside = False
        """Whether the block that runs has read or asked anything."""

    def is_by_values(self, name: str) -> bool:
        """Return whether a block is not called, or is called after the forward has read a number."""
        return name not in self.calls[: self.num_certain] or name in self.calls[self.num_certain :]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        if self._running:
            self._has_read_inside |= func is Tensor.__bool__ or _reads(func, args)
        elif self.num_certain is None:
            if func is Tensor.__bool__:
                return self._answer(args[0])
            if _reads(func, args):
                self.num_certain = len(self.calls)
        result = func(*args, **(kwargs or {}))
        if any(isinstance(value, Tensor) for value in tree_leaves(result)):  # else it asks for a shape or a dtype
            owners = {self._owners.get(id(value)) for value in tree_leaves((args, kwargs))}
            self.read_outside |= {name for name in owners if name is not None and name not in self._running}
        return result

    def _answer(self, question: Tensor) -> bool:
        number, self.num_questions = self.num_questions, self.num_questions + 1
        if number == _MAX_BRANCHES:
            self.num_certain = len(self.calls)
        is_true = not question.is_meta and bool(question)
        return is_true != (number == self._answered)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While active, runs of the model are watched."""
        with ExitStack() as stack:
            for name, block in self._blocks.items():

                def enter(*_: Any, name: str = name) -> None:
                    self.calls.append(name)
                    self._running.append(name)
                    self._has_read_inside = False

                def leave(_: nn.Module, inputs: Any, output: Any) -> None:
                    self._running.pop()
                    hands_out = any(isinstance(value, _NUMBERS) for value in tree_leaves(output))
                    if self.num_certain is None and self._has_read_inside and hands_out:
                        self.num_certain = len(self.calls)

                stack.callback(block.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(block.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(self)
            yield


def _reads(func: Any, args: Sequence[Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__getitem__":  # a mask, whose result has as many rows as it has True
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in tree_leaves(args[1]))
    return name in _READS and not (name == "where" and len(args) > 1)
