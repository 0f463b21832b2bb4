"""Parameters that a loss uses itself, beside the model's output, where ranks of a layout have parts of them.

Over a tensor axis such a loss is exact: torch's DTensor computes with all of a parameter. It is refused where ranks
with samples of their own share parameters: the gradient of such a part would have to be weighted by the samples of all
ranks, not by those of its own.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from paceline.errors import SettingsError
from paceline.parallel.loss_graph import check_parts
from paceline.parallel.number_reads import refuse_reads_of_parts
from paceline.parallel.own_forward import CALLS, running_forward
from paceline.parallel.parameter_changes import let_loops_change_parameters
from paceline.topology.layout import Layout

_MAX_FORWARDS = 1024
"""Number of the last forward passes whose operations are known; others are only searched in vain."""
_MIXED = ("mixed torch.Tensor and DTensor",)
"""Parts of torch's errors about operations on a parameter and a plain tensor."""
_UNKNOWN = (
    *("sharding strategy", "Sharding propagation failed", "not supported for tensor subclasses"),
    "in-place operations that require placement changes",
)
"""Parts of torch's errors about operations that know no parts of tensors."""


class ParameterUse:
    """Search of losses for parameters of which this rank has a part.

    Operations of forward passes are told from those of a loss by the numbers that autograd gives them in their order.

    Args:
        module: This rank's part of the model.
        layout: Layout of the model.
        has_sample: Whether `parallelize` got a sample.
    """

    def __init__(self, module: nn.Module, layout: Layout, *, has_sample: bool = False) -> None:
        self._has_sample = has_sample
        self._names = {id(p): name for name, p in module.named_parameters() if isinstance(p, DTensor)}
        self._meshes = [p.device_mesh for p in module.parameters() if isinstance(p, DTensor)]
        if self._names:
            refuse_reads_of_parts()
            let_loops_change_parameters()
        self._modules = {id(part): name for name, part in module.named_modules()}
        self._layout = layout
        self._forwards: deque[tuple[int, int]] = deque(maxlen=_MAX_FORWARDS)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around forward passes: what they do with parameters is the model's."""
        begin = next_operation()
        try:
            with running_forward():
                yield
        finally:
            self._forwards.append((begin, next_operation()))

    def check(self, loss: Tensor, *, first: int = 0) -> None:
        """Check a loss before its backward pass, which it prepares for the parameters that are found.

        Args:
            loss: The loss.
            first: Number of the first operation that may be the loss's.

        Raises:
            SettingsError: The loss uses a parameter of which ranks with samples of their own have parts.
        """
        if self._layout.tensor > 1:
            check_parts(loss, self._names, self._layout)
        operations = self._list_operations(loss, first)
        used = [node.variable for node in operations if isinstance(getattr(node, "variable", None), DTensor)]
        for variable in sorted(used, key=lambda variable: self._names.get(id(variable), "")):
            self._check_variable(variable)
        if not used:
            return
        # The model's too, whose outputs may be DTensors, such as logits that are split over the vocabulary.
        operations = self._list_operations(loss, None)
        distributed: set[Any] = set()
        for node in sorted(operations, key=_order):  # inputs before what is made of them
            if _makes_distributed(node, distributed):
                distributed.add(node)
        for node in distributed:
            for before, _ in node.next_functions:
                if before is not None and before not in distributed:
                    before.register_prehook(_as_plain)

    def explain(self, error: BaseException) -> SettingsError | None:
        """Return what an error of torch means that comes from a parameter of which this rank has a part, or None."""
        if not isinstance(error, RuntimeError) or not any(part in str(error) for part in (*_MIXED, *_UNKNOWN)):
            return None
        trace, used, reader, seen = error.__traceback__, "", None, list[DTensor]()
        while trace is not None:
            values = trace.tb_frame.f_locals
            if trace.tb_frame.f_code in CALLS and id(values["self"]) in self._modules:
                reader = self._modules[id(values["self"])]  # the innermost, so far
            tensors = [value for value in tree_leaves(list(values.values())) if isinstance(value, DTensor)]
            used, seen = next(filter(None, map(self._find_name, tensors)), used), seen + tensors
            trace = trace.tb_next
        if seen and not used and not any(one.device_mesh in self._meshes for one in seen):
            return None  # of DTensors that are no parameters of this model
        if reader is None and any(part in str(error) for part in _UNKNOWN):
            axis, size, advice = self._find_axis()
            advice = advice.removeprefix("write parameter.full_tensor() there, or ")
            return SettingsError(
                f"an operation on {used or 'a parameter'} must be one that torch knows for parts of tensors, which "
                f"ranks have over {axis}({size}), but it says {str(error).splitlines()[0]!r}; call it with "
                f"x.full_tensor() for x, on every rank, and write a result back by p.data = result, or {advice}"
            )
        if reader is None:
            used = used or ("values of parameters, such as their norms," if seen else "parameters")
            return self._refuse(f"combines {used} with tensors of its own")
        inside = (name for name in self._names.values() if name.startswith(f"{reader}." if reader else ""))
        return self._refuse_model(reader, used or next(inside, "parameters"))

    def _list_operations(self, loss: Tensor, first: int | None) -> set[Any]:
        """Return the operations of a loss, and leaves that they use: outside of forward passes, unless `first` is None.

        Over an expert or a tensor axis what modules do that the loss calls itself counts as theirs.
        """
        waiting, found = [loss.grad_fn], set[Any]()
        while waiting:
            node = waiting.pop()
            if node is None or node in found or (first is not None and self._is_of_forward(node, first)):
                continue
            found.add(node)
            if first is None or "ToTorchTensor" not in node.name():
                waiting += [before for before, _ in node.next_functions]
        return found

    def _is_of_forward(self, node: Any, first: int) -> bool:
        number = _order(node)
        return number >= 0 and (number < first or any(begin <= number < end for begin, end in self._forwards))

    def _check_variable(self, variable: DTensor) -> None:
        names = variable.device_mesh.mesh_dim_names or ()
        placements = dict(zip(names, variable.placements, strict=True))
        if "sharded" in placements or ("expert" in placements and not placements["expert"].is_replicate()):
            raise self._refuse(f"uses {self._names.get(id(variable), 'a parameter')} itself")

    def _find_name(self, tensor: Tensor) -> str:
        """Return the name of a parameter that a tensor is, or is made of."""
        name = self._names.get(id(tensor), "")
        if name or tensor.grad_fn is None:
            return name
        variables = (getattr(node, "variable", None) for node in self._list_operations(tensor, 0))
        return next((self._names[id(variable)] for variable in variables if id(variable) in self._names), "")

    def _refuse_model(self, reader: str, used: str) -> SettingsError:
        """Return the refusal of a forward that uses a parameter of another module, of which it sees a part."""
        axis, size, advice = self._find_axis()
        if axis == "sharded":
            advice = f"{advise_sample(self._has_sample, 'such uses are')}, or {advice}"
        else:
            advice = f"leave the module of {used} whole in tensor_plan, or set Layout({axis}=1)"
        where = f"{reader}.forward" if reader else "the model's forward"
        return SettingsError(
            f"forward must read parameters inside their own modules for {axis}({size}), where each rank has parts of "
            f"them, but {where} combines {used} with other tensors; {advice}"
        )

    def _refuse(self, what: str) -> SettingsError:
        axis, size, advice = self._find_axis()
        return SettingsError(
            f"a loss must be computed from the model's output for {axis}({size}), where each rank has parts of "
            f"parameters, but it {what}; leave penalties on parameters to the optimizer (weight_decay), or {advice}"
        )

    def _find_axis(self) -> tuple[str, int, str]:
        """Return the axis that divides parameters, its size, and what to do instead."""
        layout = self._layout
        sizes = {"tensor": layout.tensor, "expert": layout.expert, "sharded": layout.sharded}
        axis, size = next((axis, size) for axis, size in sizes.items() if size > 1)
        advice = {
            "tensor": "write parameter.full_tensor() there, or set Layout(tensor=1)",
            "sharded": "set Layout(zero_stage=1)",
        }
        return axis, size, advice.get(axis, f"set Layout({axis}=1)")


def advise_sample(has_sample: bool, what: str) -> str:
    """Return the advice to give `parallelize` a sample, or another one, on which something is found."""
    if has_sample:
        return f"give parallelize a sample on which {what} found, since the one that it got does not show it"
    return f"give parallelize a sample, on which {what} found"


def next_operation() -> int:
    """Return the number that autograd gives to the next operation of this thread."""
    return torch._C._autograd._get_sequence_nr()


def _order(node: Any) -> int:
    """Return the number of an operation; -1 for a leaf, which has none."""
    return -1 if hasattr(node, "variable") else int(node._sequence_nr())


def _makes_distributed(node: Any, distributed: set[Any]) -> bool:
    variable, name = getattr(node, "variable", None), node.name()
    if variable is not None or "ToTorchTensor" in name:
        return isinstance(variable, DTensor)
    return "FromTorchTensor" in name or any(before in distributed for before, _ in node.next_functions)


def _as_plain(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.full_tensor() if isinstance(one, DTensor) else one for one in gradients)
