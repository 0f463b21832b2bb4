"""A model split into stages, run forward only: for evaluation, and to find the shapes that stages send."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import MismatchError, SettingsError
from paceline.parallel.pipeline.forward_part import DTYPES
from paceline.parallel.pipeline.orders import Order
from paceline.parallel.pipeline.stages import Stage, Value, as_tuple

Description = tuple[Tensor, ...]
"""Tensors on the meta device: shape, dtype and whether a gradient comes back."""

Gradients = tuple[bool, ...]
"""Whether a gradient comes back, for each tensor of a value."""

_MAX_TENSORS = 32
_MAX_DIMS = 8
_MARK = 0x50414345
"""First number of a header, by which it differs from the values of a step."""
_HEADER = 2 + _MAX_TENSORS * (3 + _MAX_DIMS)


class ForwardPass:
    """One forward pass of micro-batches through the stages of all ranks; one object per pass.

    Each message has a header, so that no rank need know shapes beforehand. Stage by stage, each runs all micro-batches
    one after the other; messages cannot deadlock. Where ranks have several stages each, two ranks may send to each
    other, and on NCCL what is queued first must end first: a stage then sends once it has received all of its inputs,
    so that both ranks queue their messages stage by stage.
    """

    def __init__(self, stages: Sequence[Stage], num_stages: int, order: Order, group: dist.ProcessGroup) -> None:
        self._stages = stages
        self._num_stages = num_stages
        self._order = order
        self._group = group
        self._device = torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.device("cuda")
        self._handed_over: dict[tuple[int, int], tuple[Value, Gradients]] = {}
        self._sends: list[tuple[dist.Work, Tensor]] = []
        self.descriptions: dict[int, tuple[Description, Description]] = {}
        """Inputs and outputs of each stage of this rank, for the last micro-batch."""

    def run(self, chunks: Sequence[Value]) -> list[Any]:
        """Return the model's output for each micro-batch on the rank of the last stage; an empty list on others."""
        with torch.no_grad():
            outputs = self._run(chunks)
        torch.clear_autocast_cache()  # weights cast here would have no graph, and get no gradients later
        return outputs

    def _run(self, chunks: Sequence[Value]) -> list[Any]:
        outputs: list[Any] = []
        for stage in self._stages:
            late: list[tuple[Value, Gradients, int, int]] = []
            for i, chunk in enumerate(chunks):
                value, gradients = (
                    self._begin(chunk) if stage.index == 0 else self.take(stage.index, i, stage.index - 1)
                )
                output = stage(*value) if isinstance(value, tuple) else stage(value)
                gives = stage.list_gradients(output, any(gradients))
                self.descriptions[stage.index] = (_describe(value, gradients), _describe(output, gives))
                if stage.index == self._num_stages - 1:
                    outputs.append(stage.rebuild(output))
                elif self._num_stages == dist.get_world_size(self._group):
                    self.give(output, gives, stage.index + 1, i)
                else:
                    late.append((output, gives, stage.index + 1, i))
            for given in late:
                self.give(*given)
        self.wait()
        return outputs

    def wait(self) -> None:
        """Wait until all that was given is sent."""
        for work, _ in self._sends:
            work.wait()

    def _begin(self, chunk: Value) -> tuple[Value, Gradients]:
        return chunk, (False,) * len(as_tuple(chunk))

    def _place(self, stage: int) -> int:
        return self._order.place(stage, dist.get_world_size(self._group))

    def give(self, value: Value, gradients: Gradients, stage: int, micro_batch: int) -> None:
        """Send a value to the rank of a stage; it may be this one."""
        place = self._place(stage)
        if place == dist.get_rank(self._group):
            self._handed_over[stage, micro_batch] = value, gradients
            return
        tensors = as_tuple(value)
        header = torch.tensor(_encode(tensors, gradients), device=self._device)
        for tensor in (header, *tensors):
            work = dist.isend(tensor, group=self._group, group_dst=place)
            assert work is not None
            self._sends.append((work, tensor))  # the tensor must live until it is sent

    def take(self, stage: int, micro_batch: int, source: int) -> tuple[Value, Gradients]:
        """Return the value that the rank of the stage `source` gives to a stage."""
        if (stage, micro_batch) in self._handed_over:
            return self._handed_over.pop((stage, micro_batch))
        place = self._place(source)
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self._device)
        dist.recv(header, group=self._group, group_src=place)
        tensors, gradients = _decode(header.tolist(), self._device)
        for tensor in tensors:
            dist.recv(tensor, group=self._group, group_src=place)
        return (tensors[0] if len(tensors) == 1 else tuple(tensors)), gradients


def _describe(value: Value, gradients: Gradients) -> Description:
    pairs = zip(as_tuple(value), gradients, strict=True)
    return tuple(torch.empty_like(one, device="meta").requires_grad_(has_gradient) for one, has_gradient in pairs)


def _encode(tensors: Sequence[Tensor], gradients: Gradients) -> list[int]:
    if len(tensors) > _MAX_TENSORS:
        raise SettingsError(f"a stage must return {_MAX_TENSORS} tensors at most, but got {len(tensors)}; join some")
    numbers = [_MARK, len(tensors)]
    for tensor, has_gradient in zip(tensors, gradients, strict=True):
        if type(tensor) is not Tensor or tensor.dtype not in DTYPES or tensor.dim() > _MAX_DIMS:
            raise SettingsError(
                f"a stage must return plain tensors of {_MAX_DIMS} dims at most, but got {type(tensor).__name__} of "
                f"{tensor.dtype} with {tensor.dim()} dims; cut the model elsewhere"
            )
        numbers += [DTYPES.index(tensor.dtype), int(has_gradient), tensor.dim(), *tensor.shape]
    return numbers + [0] * (_HEADER - len(numbers))


def _decode(numbers: list[int], device: torch.device) -> tuple[list[Tensor], Gradients]:
    if numbers[0] != _MARK:
        raise MismatchError(
            "every rank of a pipeline must get inputs of the same shapes and dtypes in a step, but another has sent "
            "values where this one, for which they are new, expected their shapes; give all ranks the same batch"
        )
    tensors, gradients, at = [], [], 2
    for _ in range(numbers[1]):
        dtype, has_gradient, num_dims = numbers[at : at + 3]
        shape = numbers[at + 3 : at + 3 + num_dims]
        tensors.append(torch.empty(shape, dtype=DTYPES[dtype], device=device))
        gradients.append(bool(has_gradient))
        at += 3 + num_dims
    return tensors, tuple(gradients)
