"""A part of a model's forward: the calls of its blocks that are one stage's, between which its own code runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paceline.comm.streams import send_to
from paceline.data.batch import call, describe, list_tensors
from paceline.errors import SettingsError
from paceline.parallel.pipeline.absent import ADVICE, Tracking, find_missing, mark_missing
from paceline.parallel.pipeline.draws import draw_seed
from paceline.parallel.pipeline.layers import LAYERS_ADVICE
from paceline.parallel.pipeline.trace import (
    INPUTS,
    Checkpoint,
    ForwardTrace,
    Source,
    call_module,
    calls_replaced,
    find_output,
)

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_MAX_SHAPES = 64


@dataclass(frozen=True)
class Part:
    """Part of a model's forward: its calls from `begin` to before `end`, as the function of a `PipelineLayer`.

    Its value is a tuple of the tensors that cross its beginning (`ForwardTrace.find_crossing`), and, but for the first,
    one of the shapes and dtypes of all others from before it, and of a random seed if forwards draw between calls.
    """

    model: nn.Module
    trace: ForwardTrace
    begin: int
    end: int
    fills_with: float = 0.0
    """Value of tensors of which only the shape matters."""
    shares_draws: bool = True
    """Whether what forwards draw between calls is the same in all parts, by a seed that the first one draws."""
    shapes: dict[tuple[Any, ...], dict[Source, list[int]]] = field(default_factory=dict, compare=False, repr=False)
    """Shapes and dtypes of these tensors, by the shapes of those that cross the beginning."""

    def __call__(self, value: Any) -> Any:
        """Return what crosses the end, or the model's output."""
        run = _PartRun(self, (value,) if isinstance(value, Tensor) else value)
        try:
            with run.tracking, calls_replaced(self.model, self.trace, run.call_part, run.recompute):
                output = call(self.model, run.fill(INPUTS))
        except _EndOfPartError:
            return run.finish()
        finally:
            run.close()
        if self.end < len(self.trace.calls) or run.number < self.end:
            raise run.refuse("nothing more")
        output = find_output(output)
        run.refuse_missing(list_tensors(output), "its output")
        return output

    def join(self, later: "Part") -> "Part":
        """Return this part and one that begins at its end as one."""
        return replace(self, end=later.end)


class _EndOfPartError(BaseException):
    """Signal that the forward of a model has come to the end of a part; no `except` of a model's takes it."""


class _PartRun:
    """One run of a part."""

    def __init__(self, part: Part, value: tuple[Tensor, ...]) -> None:
        self._part = part
        self._trace = part.trace
        self.tracking = Tracking()
        """Mode in which the forward runs between calls."""
        self.number = 0
        """Number of calls made."""
        self._seed = 0
        """Random seed of what is drawn between calls."""
        shares_draws = self._trace.draws and part.shares_draws and not isinstance(value[0], FakeTensor)
        if part.begin == 0:
            self._known = {(INPUTS, place): tensor for place, tensor in enumerate(value)}
            self._shapes: dict[Source, list[int]] = {}
            if shares_draws:
                self._seed = self.tracking.share_draws(draw_seed(), value[0].device)
            return
        crossing = self._trace.find_crossing(part.begin)
        self._known = dict(zip(crossing, value[:-1], strict=True))
        key = (part.begin, *(tensor.shape for tensor in value[:-1]))
        if shares_draws or value[-1].device.type == "cpu" or key not in part.shapes:  # the host waits for a GPU
            if len(part.shapes) == _MAX_SHAPES:
                part.shapes.clear()
            is_rehearsed = isinstance(value[-1], FakeTensor)
            numbers = self._trace.sent[key] if is_rehearsed else value[-1].tolist()
            part.shapes[key] = _decode(self._trace, part.begin, numbers)
            if shares_draws:
                self._seed = self.tracking.share_draws(numbers[-1], value[0].device)
        self._shapes = part.shapes[key]

    def call_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of this part, or return what it would."""
        number, calls = self.number, self._trace.calls
        if number >= len(calls) or not self._trace.is_call(number, module, self._part.model):
            raise self.refuse(self._trace.names.get(module, type(module).__name__))
        if number == self._part.end:
            raise _EndOfPartError
        self.number += 1
        if number < self._part.begin:
            output = self.fill(number)
            self.tracking.unhooked += list_tensors(output)
            return output
        self.tracking.unhooked.clear()
        self.refuse_missing((args, kwargs), calls[number].name)
        with self.tracking.paused():
            output = call_module(module, *args, **kwargs)
        structure, tensors = calls[number].output.of(output)
        if structure != calls[number].output or [one.dim() for one in tensors] != [
            one.num_dims for one in calls[number].tensors
        ]:
            raise self.refuse(f"{calls[number].name} with another output, {describe(output)}")
        sources = [(number, place) for place in range(len(tensors))]
        self._known |= zip(sources, tensors, strict=True)
        if not self._trace.changed.intersection(sources):
            return output
        return structure.fill([self._own(source, one) for source, one in zip(sources, tensors, strict=True)])

    def recompute(self, begin: Checkpoint) -> Iterator[None]:
        """Run a checkpoint, but for one of calls of earlier parts: running these again would give nothing."""
        if self.number < self._part.begin:
            yield
        else:
            yield from begin()

    def fill(self, number: int) -> Any:
        """Return the inputs or the output of an earlier call: what was sent, and empty tensors of the right shape."""
        found = self._trace.inputs if number == INPUTS else self._trace.calls[number].output
        sources = [(number, place) for place in range(len(self._trace.tensors_of(number)))]
        known = self._known
        return found.fill([self._own(one, known[one]) if one in known else self._make(one) for one in sources])

    def _own(self, source: Source, tensor: Tensor) -> Tensor:
        """Return a tensor for the forward, one of its own if it is changed in place there: what is sent is not."""
        return tensor.clone() if source in self._trace.changed else tensor

    def finish(self) -> tuple[Tensor, ...]:
        """Return what crosses the end of the part."""
        values = [self._known[source] for source in self._trace.find_crossing(self._part.end)]
        self.refuse_missing(values, "what is sent to the next stage")
        numbers: list[int] = []
        for source in _find_shaped(self._trace, self._part.end):
            known = self._known.get(source)
            numbers += [DTYPES.index(known.dtype), *known.shape] if known is not None else self._shapes[source]
        numbers += [self._seed] if self._trace.draws else []
        if isinstance(values[0], FakeTensor):
            self._trace.sent[self._part.end, *(value.shape for value in values)] = numbers
        return (*values, send_to(values[0].device, torch.tensor(numbers, dtype=torch.int64)))

    def close(self) -> None:
        """Forget all results, which whoever holds the run would keep."""
        self._known.clear()

    def refuse_missing(self, data: Any, user: str) -> None:
        """Raise `SettingsError` if tensors come from what this part does not have."""
        if missing := find_missing(data):
            raise SettingsError(
                "a model run as a pipeline must use the same results and parameters in each part of its forward as on "
                f"the sample, but {user} comes from {missing}; {ADVICE}"
            )

    def refuse(self, what: str) -> SettingsError:
        """Return the error of a forward that is not the recorded one."""
        calls = self._trace.calls
        wanted = calls[self.number].name if self.number < len(calls) else "the end"
        return SettingsError(
            f"a model run as a pipeline must call its parts in the order in which it did on the sample, but call "
            f"{self.number + 1} is {what}, where it was {wanted}; {LAYERS_ADVICE}"
        )

    def _make(self, source: Source) -> Tensor:
        dtype, *shape = self._shapes[source]
        device = next(iter(self._known.values())).device
        made = torch.empty(shape, dtype=DTYPES[dtype], device=device)
        if not made.is_floating_point():
            made.zero_()  # it may be an index
        elif self._part.fills_with:
            made.fill_(self._part.fills_with)
        number, place = source
        owner = f"input {place + 1}" if number == INPUTS else f"the output of {self._trace.calls[number].name}"
        mark_missing(made, f"{owner}, which the sample did not use there")
        return made


def _find_shaped(trace: ForwardTrace, end: int) -> list[Source]:
    """Return the tensors from before call `end` whose shapes cross it, but not their values."""
    everything = [(number, i) for number in range(INPUTS, end) for i in range(len(trace.tensors_of(number)))]
    crossing = set(trace.find_crossing(end))
    return [source for source in everything if source not in crossing]


def _decode(trace: ForwardTrace, begin: int, numbers: Sequence[int]) -> dict[Source, list[int]]:
    shapes, at = {}, 0
    for number, place in _find_shaped(trace, begin):
        length = 1 + trace.tensors_of(number)[place].num_dims
        shapes[number, place] = [*numbers[at : at + length]]
        at += length
    return shapes
