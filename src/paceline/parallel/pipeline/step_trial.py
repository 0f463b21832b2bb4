"""One step of a pipeline on a sample before it trains, stage by stage: what one rank cannot run is said on all."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

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
        self._noted: list[tuple[str, weakref.ref[Tensor]]] = []
        """Outputs of hooked modules, with their names."""
        self._runs: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...], Gradients]] = {}

    def run(self, inputs: tuple[Tensor, ...]) -> None:
        """Raise `SettingsError` on all ranks if a stage cannot run."""
        with self._gradients_kept(), torch.enable_grad():
            self._run_stages(inputs)
        self._passing.wait()
        self._runs.clear()
        self._raise_alike(self._describe_kept())

    def _run_stages(self, inputs: tuple[Tensor, ...]) -> None:
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

    def _run_forward(self, stage: Stage, inputs: tuple[Tensor, ...]) -> None:
        value, gradients = (inputs, (False,) * len(inputs)) if stage.index == 0 else self._taken
        given = tuple(one.detach().requires_grad_(gives) for one, gives in zip(as_tuple(value), gradients, strict=True))
        with self._hooked_outputs_noted(stage):
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
        self._raise_alike(said)

    def _raise_alike(self, said: str) -> None:
        if found := next(filter(None, self._world.gather_documents(said, name="trial of a pipeline's stage")), ""):
            raise SettingsError(found)

    @contextmanager
    def _hooked_outputs_noted(self, stage: Stage) -> Iterator[None]:
        """Note the outputs of modules with forward hooks of the user's, in all stages but that of the loss."""
        is_noted = stage.index < self._num_stages - 1
        hooked = [module for module in stage.modules() if is_noted and module._forward_hooks]
        names = {module: name for name, module in stage.model.named_modules()} if hooked else {}

        def note(module: nn.Module, _inputs: object, output: object) -> None:
            for tensor in list_tensors(output):
                if tensor.requires_grad:
                    self._noted.append((names.get(module, ""), weakref.ref(tensor)))

        handles = [module.register_forward_hook(note) for module in hooked]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _describe_kept(self) -> str:
        """Return what is wrong if a user's hook keeps an activation that a loss might use: the last rank has none."""
        if any(reference() is not None for _, reference in self._noted):
            gc.collect()  # it may be in a ring of references that nobody holds
        kept = next((name for name, reference in self._noted if reference() is not None), None)
        if kept is None:
            return ""
        return (
            "hooks of a model run as a pipeline must keep no activations that a loss could use, since the rank that "
            f"computes it misses those of other stages, but one on {kept or 'a module'} keeps its output; return it "
            "from forward, keep it detached if it is only looked at, or set Layout(pipeline=1) (--layout.pipeline 1)"
        )

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
