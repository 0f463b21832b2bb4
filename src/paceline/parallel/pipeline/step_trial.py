"""One step of a pipeline on a sample before it trains, stage by stage: what one rank cannot run is said on all."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.data.batch import list_tensors
from paceline.errors import PacelineError, SettingsError
from paceline.parallel.pipeline.forward import ForwardPass, Gradients
from paceline.parallel.pipeline.layers import LAYERS_ADVICE
from paceline.parallel.pipeline.stages import Stage, as_tuple


class StepTrial:
    """A forward and a backward pass of a sample through the stages of all ranks.

    Each stage runs once the one before has told all ranks that it could, so that none waits for a rank that could not.
    It changes nothing but random streams, buffers and attributes.

    Args:
        stages: Stages of this rank.
        passing: Pass by which ranks hand values on, used for nothing else.
        num_stages: Number of stages of the whole pipeline.
        world: All ranks.
    """

    def __init__(self, stages: Sequence[Stage], passing: ForwardPass, num_stages: int, world: Group) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._passing = passing
        self._num_stages = num_stages
        self._world = world
        self._runs: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...], Gradients]] = {}

    def run(self, inputs: tuple[Tensor, ...]) -> None:
        """Raise `SettingsError` on all ranks if a stage cannot run."""
        with self._gradients_kept(), torch.enable_grad():
            for index in range(self._num_stages):
                self._try(index, lambda stage: self._run_forward(stage, inputs), "forward")
                if index in self._runs and index < self._num_stages - 1:
                    _, outputs, gives = self._runs[index]
                    self._passing.give(tuple(one.detach() for one in outputs), gives, index + 1, 0)
            for index in reversed(range(self._num_stages)):
                self._try(index, self._run_backward, "backward")
                if index in self._runs and index > 0:
                    taken = [one for one in self._runs[index][0] if one.requires_grad]
                    sent = tuple(torch.zeros_like(one) if one.grad is None else one.grad.contiguous() for one in taken)
                    self._passing.give(sent, (False,) * len(sent), index - 1, 1)
        self._passing.wait()

    def _run_forward(self, stage: Stage, inputs: tuple[Tensor, ...]) -> None:
        value, gradients = (inputs, (False,) * len(inputs)) if stage.index == 0 else self._taken
        given = tuple(one.detach().requires_grad_(gives) for one, gives in zip(as_tuple(value), gradients, strict=True))
        output = stage(*given)
        outputs = as_tuple(output)
        gives = stage.list_gradients(output, any(gradients))
        if stage.index == self._num_stages - 1:
            outputs = tuple(one for one in list_tensors(stage.rebuild(output)) if one.requires_grad)
        self._runs[stage.index] = given, outputs, gives

    def _run_backward(self, stage: Stage) -> None:
        _, outputs, gives = self._runs[stage.index]
        if stage.index == self._num_stages - 1:
            gradients = [torch.ones_like(one) for one in outputs]
        else:
            gradients = list(as_tuple(self._taken[0]))
            outputs = tuple(one for one, has_gradient in zip(outputs, gives, strict=True) if has_gradient)
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])

    def _try(self, index: int, run: Callable[[Stage], None], direction: str) -> None:
        """Run a stage on the rank that has it, and raise on all ranks what it raises there."""
        said = ""
        if (stage := self._stages.get(index)) is not None:
            if direction == "forward" and index > 0:
                self._taken = self._passing.take(index, 0, index - 1)
            elif direction == "backward" and index < self._num_stages - 1:
                self._taken = self._passing.take(index, 1, index + 1)
            try:
                run(stage)
            except PacelineError as error:
                said = str(error)
            except Exception as error:
                names = [layer.name for layer in stage.layers]
                said = (
                    f"a model run as a pipeline must run {direction} on the sample, but its stage of "
                    f"{', '.join(names)} says {type(error).__name__}: {error}; {LAYERS_ADVICE}"
                )
        if found := next(filter(None, self._world.gather_documents(said, name="trial of a pipeline's stage")), ""):
            raise SettingsError(found)

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Leave each parameter the gradient that it has."""
        kept = [(one, one.grad) for stage in self._stages.values() for one in stage.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
