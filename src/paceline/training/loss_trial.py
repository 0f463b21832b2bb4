"""Trial of a run's loss on a sample before the first step: one that a layout would make another loss is refused."""

import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.data.base import Splits
from paceline.data.batch import Batch, list_tensors, map_tensors
from paceline.data.order import Interval
from paceline.errors import SettingsError
from paceline.parallel.context import full_sequences, split_sequences
from paceline.parallel.local import local
from paceline.parallel.model_shard import ModelShard
from paceline.parallel.start import broadcast_sample
from paceline.parallel.tensor import full_tensor
from paceline.parallel.trial import undisturbed
from paceline.replica.attributes import find_attribute
from paceline.replica.checks import Precision
from paceline.replica.loss import Loss
from paceline.replica.optimizer_step import autocast
from paceline.training.objective import FunctionLoss, Objective
from paceline.training.run import Run

_TOLERANCE = 1e-3
"""Relative difference that rounding makes in 32 bits: in 16, a few times the distance of neighbouring numbers."""


class LossTrial:
    """Trial of a loss by the ranks of a layout.

    Outputs of the model are leaves here, so that gradients of the loss end at them. What else they reach are
    parameters that the loss uses itself.

    Args:
        objective: The loss.
        shard: Shard of this rank.
        precision: Precision of forward.
    """

    def __init__(self, objective: Objective, shard: ModelShard, precision: Precision = "fp32") -> None:
        self._objective, self._shard = objective, shard
        self._cast = partial(autocast, precision, shard.world.device.type)

    def check(self, data: Any) -> None:
        """Raise `SettingsError` on all ranks if the loss of a sample is, or may be, another in the layout.

        Args:
            data: Data of a batch of one sample, the same on all ranks that share it.
        """
        shard, batch = self._shard, Batch(data, 1, Interval(0, 1))
        with undisturbed(shard.module):
            part, problem = self._try_part(shard.split_context(batch))
            self._raise_first(problem)
            if shard.layout.context == 1:
                return
            whole = self._try_whole(batch)
            problem = self._compare(whole, part)
            if any(shard.world.gather_documents(problem, name="loss of parts")) and self._is_random(whole, batch):
                problem = ""
            self._raise_first(problem)

    def _raise_first(self, problem: str) -> None:
        if first := next(filter(None, self._shard.world.gather_documents(problem, name="trial of the loss")), ""):
            raise SettingsError(first)

    def _try_part(self, batch: Batch) -> "tuple[_Measured | None, str]":
        """Return the loss of this rank's part of a batch, or why the loss cannot be computed here."""
        try:
            measured = self._measure(batch)
        except Exception as error:
            if not _is_of_dtensor(error):
                return None, ""  # as any other, the first step raises it
            reason = str(error).strip().partition("\n")[0]
            return None, self._describe_use(f"raises {type(error).__name__}: {reason}")
        if measured is None or not measured.used or not self._refuses_parameters:
            return measured, ""
        return measured, self._describe_use(f"uses {measured.used}")

    def _try_whole(self, batch: Batch, seed: int = 0) -> "_Measured | None":
        try:
            with full_sequences(self._shard.module):
                return self._measure(batch, seed)
        except Exception:  # a loss that cannot take a sample alone; the first step raises it
            return None

    def _measure(self, batch: Batch, seed: int = 0) -> "_Measured | None":
        """Return the loss of a batch, and its gradients with respect to the model's outputs; None on earlier stages."""
        shard, objective = self._shard, self._objective
        model = _DetachedModel(shard.module, self._cast)
        torch.manual_seed(seed)
        with shard.forward_context():
            if shard.pipeline is not None:
                with torch.no_grad(), self._cast():
                    output = shard.pipeline.evaluate(tuple(list_tensors(batch.inputs)))
                if output is None:
                    return None
                loss = objective.loss_of_output(model.detach(output), batch)
            else:
                with model.detaching():
                    loss = objective.loss(model, batch)
            used = _find_used(loss.mean, shard.module, model.outputs)
            gradients: tuple[Tensor | None, ...] = ()
            if loss.mean.requires_grad and not used:
                gradients = torch.autograd.grad(full_tensor(loss.mean), model.outputs, allow_unused=True)
            elif used and not self._refuses_parameters:  # torch may know parts of tensors in forward only
                trained = [parameter for parameter in shard.module.parameters() if parameter.requires_grad]
                shard.check_loss(loss.mean)
                torch.autograd.grad(full_tensor(loss.mean), trained, allow_unused=True)
            return _Measured(loss, float(full_tensor(loss.mean.detach())), gradients, used)

    def _compare(self, whole: "_Measured | None", part: "_Measured | None") -> str:
        """Return the refusal of a loss whose parts do not add up to that of the whole sample."""
        mesh = self._shard.mesh
        assert mesh is not None
        mine = [part.loss.weight, repr(part.mean)] if part is not None else [0.0, "nan"]
        said = mesh.group("context").gather_documents(mine, name="loss of a part")
        total = sum(weight for weight, _ in said)
        if whole is None or part is None or not total or not whole.loss.weight:
            return ""
        mean = sum(weight * float(text) for weight, text in said if weight) / total
        if not abs(mean - whole.mean) <= _TOLERANCE * max(abs(whole.mean), abs(mean)):
            return self._describe_parts(f"is {whole.mean:.6g} of a sample and {mean:.6g} of its parts")
        for expected, found in zip(whole.gradients, part.gradients, strict=False):
            if expected is None or expected.dim() < 2 or expected.shape[1] % (2 * mesh.size("context")):
                continue
            wanted = split_sequences(local(expected), mesh)
            scaled = torch.zeros_like(wanted) if found is None else local(found) * (part.loss.weight / total)
            tolerance = max(_TOLERANCE, 8 * torch.finfo(wanted.dtype).eps)
            if scaled.shape != wanted.shape or not (scaled - wanted).abs().max() <= tolerance * expected.abs().max():
                return self._describe_parts("has other gradients for parts of a sample than for all of it")
        return ""

    def _is_random(self, whole: "_Measured | None", batch: Batch) -> bool:
        """Return whether the loss of a whole sample depends on the random seed."""
        again = self._try_whole(batch, seed=1)
        is_same = whole is None or again is None or whole.mean == again.mean
        return not all(self._shard.world.gather_documents(is_same, name="random loss"))

    @property
    def _refuses_parameters(self) -> bool:
        """Whether a loss that uses parameters itself would get wrong gradients."""
        return self._shard.layout.expert > 1 or self._shard.layout.shards_parameters

    @property
    def _name(self) -> str:
        return self._objective.path if isinstance(self._objective, FunctionLoss) else str(self._objective.name)

    def _describe_use(self, what: str) -> str:
        layout = self._shard.layout
        axes = {"tensor": layout.tensor, "expert": layout.expert, "sharded": layout.sharded}
        axis = next(f"{axis}({size})" for axis, size in axes.items() if size > 1)
        option = axis.partition("(")[0]
        write = "write parameter.full_tensor() there, or " if option == "tensor" else ""
        return (
            f"a loss must be computed from the model's output for {axis}, where each rank has parts of parameters, but "
            f"{self._name} {what}; leave penalties on parameters to the optimizer (weight_decay), or {write}take "
            f"--layout.{option} 1 and --layout.data {axes[option]}"
        )

    def _describe_parts(self, what: str) -> str:
        return (
            f"a loss must be a mean over tokens with their number as its weight for "
            f"context({self._shard.layout.context}), where each rank has parts of every sequence, but {self._name} "
            f"{what}; do not shift labels in the loss: compare all logits with batch.next_labels, or with labels that "
            "collate_fn has shifted, or leave the axis out (--layout.context 1)"
        )


def check_loss(run: Run, splits: Splits, shard: ModelShard) -> None:
    """Raise `SettingsError` if the run's layout would make another loss of the run's own, as far as a sample shows."""
    layout = shard.layout
    sees_parameters = shard.pipeline is None and (layout.tensor > 1 or layout.expert > 1 or layout.shards_parameters)
    if layout.context == 1 and not sees_parameters:
        return
    data = Batch(splits.train.read_first(), 1, Interval(0, 1)).to(shard.world.device).data
    if layout.context > 1 or layout.tensor > 1:  # whose ranks run the same sample
        data = broadcast_sample(data, shard.world)
    LossTrial(run.loss, shard, run.precision).check(data)


class _Measured(NamedTuple):
    loss: Loss
    mean: float
    gradients: tuple[Tensor | None, ...]
    """Gradients with respect to the model's outputs, in the order in which it returned them."""
    used: str
    """Name of a parameter that the loss uses itself; empty for none."""


class _DetachedModel:
    """A model that is called like a replica, and whose outputs are leaves."""

    def __init__(self, module: nn.Module, cast: Callable[[], AbstractContextManager[Any]]) -> None:
        self.module = module
        self.outputs: list[Tensor] = []
        """Floating-point tensors that the model has returned."""
        self._cast = cast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module forward."""
        return self._run(self.module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return find_attribute(self, name, self._run)

    def detach(self, output: Any) -> Any:
        """Return an output whose tensors are leaves."""

        def make_leaf(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            self.outputs.append(tensor.detach().clone().requires_grad_())
            # What is changed in place may be no leaf.
            return self.outputs[-1].view_as(self.outputs[-1])

        return map_tensors(make_leaf, output)

    def detaching(self) -> AbstractContextManager[Any]:
        """Return the context in which outputs of submodules that the loss calls itself are leaves too."""
        parts = set(self.module.modules())

        def hook(module: nn.Module, _args: Any, output: Any) -> Any:
            return self.detach(output) if torch.is_grad_enabled() and module in parts else None

        return torch.nn.modules.module.register_module_forward_hook(hook)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), self._cast():
            output = function(*args, **kwargs)
        return self.detach(output)


def _find_used(loss: Tensor, module: nn.Module, outputs: list[Tensor]) -> str:
    """Return the name of a parameter that a loss uses itself; empty for none."""
    names: Mapping[int, str] = {id(parameter): name for name, parameter in module.named_parameters()}
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of what adds to a leaf's gradient
        if variable is not None and id(variable) in names:
            return names[id(variable)]
        waiting += [before for before, _ in node.next_functions]
    return ""


def _is_of_dtensor(error: BaseException) -> bool:
    """Return whether torch's DTensor has raised an error, or somebody who was given one."""
    frames = traceback.extract_tb(error.__traceback__)
    return "DTensor" in str(error) or any("torch/distributed/tensor" in frame.filename for frame in frames)
