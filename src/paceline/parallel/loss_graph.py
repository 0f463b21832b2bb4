"""What a loss uses beside the model's output, found in its graph: refused where ranks would count it wrongly."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.errors import SettingsError
from paceline.topology.layout import Layout

_PART = "paceline: part"
_KEEPING = "an attribute that forward sets, or a user's hook, keeps such values"


class FormerParameters:
    """Parameters that a module had before `parallelize` gave it others, as long as somebody keeps them.

    A criterion that was made before may: what it does with them would train nothing.

    Args:
        module: Whole module, before it is split.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names: Any = WeakTensorKeyDictionary()
        for name, parameter in module.named_parameters():
            self._names[parameter] = name

    def forget(self, module: nn.Module) -> None:
        """Leave out the parameters that a module still has."""
        for parameter in module.parameters():
            self._names.pop(parameter, None)

    def check(self, loss: Tensor, layout: Layout) -> None:
        """Raise `SettingsError` if a loss would give one of them a gradient."""
        if not len(self._names) or loss.grad_fn is None:  # as it is unless somebody keeps one
            return
        for node in _walk([loss.grad_fn], lambda node: True):
            variable = getattr(node, "variable", None)
            if variable is not None and (name := self._names.get(variable)) is not None:
                raise SettingsError(
                    f"a loss must use the parameters that the model has since parallelize, but it uses {name} as it "
                    f"was before, which {_describe_axis(layout)} has replaced and nothing trains; make what keeps it "
                    "from the module that parallelize returns, or leave penalties on parameters to the optimizer "
                    "(weight_decay)"
                )


def mark_part(value: Tensor) -> Tensor:
    """Record that a tensor is a rank's part of an activation, for losses that use it itself; return it."""
    if value.grad_fn is not None and not torch.compiler.is_compiling():
        metadata: Any = value.grad_fn.metadata  # annotated by torch as if it were a method
        metadata[_PART] = True
    return value


def check_parts(loss: Tensor, names: Mapping[int, str], layout: Layout) -> None:
    """Raise `SettingsError` if a loss over a tensor axis uses what a rank has a part of, inside of divided blocks.

    Such a value is made of a part of a parameter, or of activations, with no exchange between ranks after it.

    Args:
        loss: The loss.
        names: Names of the parameters, by their ids.
        layout: Layout of the model.
    """
    if loss.grad_fn is None:
        return
    for node in _walk([loss.grad_fn], lambda node: "TorchTensor" not in node.name()):
        is_part, variable = _PART in node.metadata, None
        if not is_part and "ToTorchTensor" in node.name():
            variable = getattr(node.next_functions[0][0], "variable", None)
            is_part = isinstance(variable, DTensor) and _is_divided(variable)
        if is_part:
            name = names.get(id(variable), "")
            where = f"the block around {name.rpartition('.')[0]}" if name else "a block"
            raise SettingsError(
                f"a loss must be computed from the model's output for tensor({layout.tensor}), but it uses values of "
                f"{where} of which each rank has a part: {_KEEPING}; return them from forward, leave that block whole "
                "in tensor_plan, or set Layout(tensor=1) (--layout.tensor 1)"
            )


def check_kept(loss: Tensor, outputs: Iterable[Tensor], first: int, module: nn.Module) -> None:
    """Raise `SettingsError` if a loss of a pipeline uses activations of the last stage that are not its outputs.

    Those of other stages would be missing from it.

    Args:
        loss: The loss.
        outputs: Outputs of the last stage.
        first: Number of the first operation that may be the loss's.
        module: Part of the model on this rank.
    """
    given = {one.grad_fn for one in outputs}
    pending = [loss.grad_fn] if loss.grad_fn is not None else []
    for node in _walk(pending, lambda node: _is_leaf(node) or (node not in given and node._sequence_nr() >= first)):
        before = [one for one, _ in node.next_functions if one is not None]
        is_activation = not before or not all(map(_is_leaf, before))  # unlike a parameter that autocast has cast
        if node in given or _is_leaf(node) or node._sequence_nr() >= first or not is_activation:
            continue
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        leaves = (id(one.variable) for one in _walk([node], lambda node: True) if _is_leaf(one))
        maker = next((names[leaf] for leaf in leaves if leaf in names), "the last stage")
        raise SettingsError(
            "the loss of a pipeline must be computed from the model's output, since it misses what other stages keep, "
            f"but it uses values that were made with {maker} and are not returned: {_KEEPING}; return them from "
            "forward, keep them detached if they are only looked at, or set Layout(pipeline=1) (--layout.pipeline 1)"
        )


def _walk(pending: list[Any], goes_on: Any) -> Iterator[Any]:
    """Yield operations, and then those before each one of which `goes_on` is true, nearest first."""
    seen = set(pending)
    for node in pending:  # grows meanwhile
        yield node
        for before, _ in node.next_functions if goes_on(node) else ():
            if before is not None and before not in seen:
                seen.add(before)
                pending.append(before)


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _is_divided(variable: DTensor) -> bool:
    names = variable.device_mesh.mesh_dim_names or ()
    pairs = zip(names, variable.placements, strict=True)
    return any(name == "tensor" and not placement.is_replicate() for name, placement in pairs)


def _describe_axis(layout: Layout) -> str:
    sizes = {axis: getattr(layout, axis) for axis in ("tensor", "expert", "pipeline", "sharded")}
    return next((f"{axis}({size})" for axis, size in sizes.items() if size > 1), "the layout")
