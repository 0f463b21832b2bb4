"""Proof on a sample that a model split over the tensor axis computes what the whole one did, before it trains."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.data.batch import call, list_tensors, map_tensors
from paceline.errors import SettingsError
from paceline.parallel.counters import NUM_LATER, Numbers, find_counters, set_numbers
from paceline.parallel.local import local
from paceline.parallel.model_shard import summed_gradient
from paceline.parallel.tensor_plan import TensorPlan, place
from paceline.parallel.tensor_proof import COUNTS, explaining_sample, relative_error, tolerance
from paceline.parallel.tensor_styles import slice_of
from paceline.parallel.trial import restored, training, vary

_FLOOR = 1e-3
"""Part of the mean gradient below which a gradient is rounding, such as that of the bias of attention's keys."""

Runs = Sequence[tuple[nn.Module, Any, bool]]
"""Modules with their inputs, and whether another stage sends these: a model with a sample, or a pipeline's stages that
this rank holds."""


def _same(inputs: Any) -> Any:
    return inputs


class _Varied(NamedTuple):
    """A run of the whole model with something changed."""

    when: str
    """Words for the change, at the end of a refusal."""
    change: Callable[[Any], Any]
    """Function from the sample to that of the run."""
    numbers: Numbers
    """Attributes and buffers with other values."""
    outputs: list[Tensor]
    """Outputs of the run."""


class SplitCheck:
    """Comparison of split modules with whole ones: outputs and all gradients for one sample.

    Made while modules are whole; `compare` runs after the split. Each costs one forward and one backward pass of a
    sample as in training, without dropout, one forward in evaluation, one of a sample of other values, and one with
    what each forward counts where it will be after many, if there is such; of the whole gradients a rank keeps its own
    part only. A model that still draws random numbers in training is compared in
    evaluation only.

    Args:
        module: The model, or what a rank of a pipeline holds of it.
        runs: Runs of the model and of its stages.
        plan: Plan of the whole model.
        position: Index of this rank on the tensor axis.
        size: Number of ranks along the tensor axis.

    Raises:
        SettingsError: The model does not run on the sample.
    """

    def __init__(self, module: nn.Module, runs: Runs, plan: TensorPlan, *, position: int, size: int) -> None:
        self._module = module
        self._runs = runs
        self._plan = plan
        self._size = size
        self._position = position
        self._gradients: dict[str, Tensor] = {}
        self._outputs: list[Tensor] = []
        placements = place(module, plan.of_stage(module).styles)
        with ExitStack() as stack, torch.enable_grad():
            for name, parameter in module.named_parameters():

                def keep(parameter: Tensor, name: str = name) -> None:
                    assert parameter.grad is not None
                    own = slice_of(placements[id(parameter)], parameter.grad, position, size)
                    self._gradients[name] = own.clone()
                    parameter.grad = None

                if parameter.requires_grad:
                    stack.callback(parameter.register_post_accumulate_grad_hook(keep).remove)
            stack.enter_context(explaining_sample(module))
            with torch.no_grad():
                self._evaluated, _ = self._run()
                with training(module):
                    others, _ = self._run(first_seed=1)
            self._mode: Callable[[nn.Module], AbstractContextManager[Any]] = training
            self._run_whole()
            if any(map(self._error, others, self._outputs)):
                self._mode = nullcontext
                self._run_whole()
            self._varied = self._run_varied()

    def _run_whole(self) -> None:
        with self._mode(self._module):
            self._outputs, self._seen = self._run()

    def _run_varied(self) -> list["_Varied"]:
        """Return the whole model's outputs for a sample of other values, and with numbers that its forwards move."""
        with torch.no_grad(), self._mode(self._module):
            counters = find_counters(self._module, self._call_all)
            changes: list[tuple[str, Callable[[Any], Any], Numbers]] = [("for a sample of other values", vary, [])]
            changes += [(f"after {NUM_LATER} forwards", _same, counters)] if counters else []
            varied = []
            for when, change, numbers in changes:
                try:
                    outputs, _ = self._run(change=change, numbers=numbers)
                except Exception:  # such as an index out of range
                    continue
                if all(one.isfinite().any() for one in outputs):
                    varied.append(_Varied(when, change, numbers, outputs))
        return varied

    def _call_all(self) -> None:
        for module, inputs, _ in self._runs:
            call(module, map_tensors(torch.clone, inputs))

    def compare(self, world: Group) -> None:
        """Raise `SettingsError` on all ranks if the split modules compute something else on one."""
        said = world.gather_documents(self._find_difference(), name="comparison of the split model")
        if found := [about for about in said if about]:
            raise SettingsError(found[0])

    def _find_difference(self) -> str | None:
        """Return what is wrong, as a sentence, or None."""
        calls: list[str] = []
        try:
            with torch.enable_grad(), self._mode(self._module):
                outputs, seen = self._run(calls)
            with torch.no_grad():  # torch's encoders then take other paths
                evaluated, _ = self._run([])
                with self._mode(self._module):
                    varied = [self._run(calls, change=one.change, numbers=one.numbers) for one in self._varied]
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            return self._describe(
                calls[-1] if calls else "", f"fails on a rank's part with {type(error).__name__}: {error}"
            )
        finally:
            found = {name: summed_gradient(parameter) for name, parameter in self._module.named_parameters()}
            for parameter in self._module.parameters():
                parameter.grad = None
        compared = [(outputs, seen, self._outputs, ""), (evaluated, seen, self._evaluated, "")]
        compared += [(*run, one.outputs, f" {one.when}") for run, one in zip(varied, self._varied, strict=True)]
        for one, of_modules, other, when in compared:
            if torn := [(a, b) for a, b in zip(one, other, strict=True) if not self._fits(a, b)]:
                a, b = (tuple(output.shape) for output in torn[0])
                return self._describe("", f"returns a tensor of the shape {a}, a rank's part of one of {b},")
            worst = max((self._error(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
            if worst:
                pairs = self._pair_up(of_modules) if not when else ()
                name = next((n for n, value in pairs if self._error(*value)), "")
                return self._describe(name, f"returns values that differ by {worst:.1e} of their size{when}")
        return self._compare_gradients(found)

    def _compare_gradients(self, found: Mapping[str, Tensor | None]) -> str | None:
        squares = [float(gradient.double().square().sum()) for gradient in self._gradients.values()]
        numbers = sum(gradient.numel() for gradient in self._gradients.values())
        mean = (sum(squares) / max(numbers, 1)) ** 0.5
        for name, gradient in self._gradients.items():  # in the order of backward: errors go on to what is before
            got = found[name]
            own = torch.zeros_like(gradient) if got is None else local(got)
            floor = _FLOOR * mean * gradient.numel() ** 0.5
            error = relative_error(own, gradient, floor) if own.shape == gradient.shape else float("inf")
            if error > tolerance(gradient.dtype):
                owner = name.rpartition(".")[0]
                return self._describe(
                    owner, f"has a gradient of {name} that differs by {error:.1e} of its size", "partial"
                )
        return None

    def _run(
        self,
        calls: list[str] | None = None,
        first_seed: int = 0,
        change: Callable[[Any], Any] = _same,
        numbers: Numbers = (),
    ) -> tuple[list[Tensor], list[tuple[str, Tensor]]]:
        """Return outputs, and what each module returned, in the order of their ends; gradients if they are enabled.

        Args:
            calls: List for the names of the modules that are running.
            first_seed: Random seed of the first run.
            change: Function from the inputs to those that are given.
            numbers: Attributes and buffers, with the values that they have meanwhile.
        """
        seen: list[tuple[str, Tensor]] = []
        outputs: list[Tensor] = []
        running = [] if calls is None else calls
        with restored(self._module), ExitStack() as stack:
            set_numbers(numbers)
            for name, part in self._module.named_modules():

                def enter(module: nn.Module, args: Any, name: str = name) -> None:
                    running.append(name)

                def leave(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                    running.pop()
                    seen.extend((name, one.detach()) for one in _floats(output)[:1])

                stack.callback(part.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(part.register_forward_hook(leave).remove)
            for number, (module, inputs, is_sent) in enumerate(self._runs):
                torch.manual_seed(first_seed + number)
                given = change(inputs)
                given = map_tensors(self._cut, given) if calls is not None and is_sent else given
                for output in (found := _floats(call(module, given))):
                    outputs.append(output.detach())
                self._backward(found, len(outputs) - len(found))
        return outputs, seen

    def _backward(self, outputs: Sequence[Tensor], first: int) -> None:
        """Run backward from a sum of all outputs with fixed weights, which are those of all tokens."""
        terms = []
        for number, output in enumerate(outputs):
            whole = self._outputs[first + number] if self._outputs else output
            if output.requires_grad and self._fits(output, whole):
                shape = whole.shape
                weights = torch.randn(shape, generator=torch.Generator().manual_seed(number))
                weights = weights if shape == output.shape else self._cut(weights)
                terms.append((output * weights.to(output)).sum().double() / shape.numel() ** 0.5)
        if terms:
            torch.stack(terms).sum().backward()

    def _cut(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens of activations between blocks."""
        is_cut = self._plan.cuts_tokens and whole.is_floating_point() and whole.dim() > 1
        return whole.chunk(self._size, -2)[self._position] if is_cut else whole

    def _fits(self, one: Tensor, whole: Tensor) -> bool:
        """Return whether a tensor is as large as that of the whole model, or as this rank's tokens of it."""
        return one.shape in (whole.shape, self._cut(whole).shape)

    def _error(self, one: Tensor, other: Tensor) -> float:
        """Return the relative error of a tensor if it is too large, else 0."""
        other = other if one.shape == other.shape else self._cut(other)
        if one.shape != other.shape:
            return float("inf")
        error = relative_error(one, other)
        return error if error > tolerance(other.dtype) else 0.0

    def _pair_up(self, seen: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Yield the modules that return a tensor of the same shape, whole and split, in the order of their ends."""
        expected: dict[str, list[Tensor]] = {}
        for name, value in self._seen:
            expected.setdefault(name, []).append(value)
        for name, value in seen:
            whole = expected[name].pop(0) if expected.get(name) else None
            if whole is not None and self._fits(value, whole):
                yield name, (value, whole)

    def _describe(self, name: str, what: str, remedy: str = "") -> str:
        """Return the refusal of a plan."""
        part = self._module.get_submodule(name)
        around = name.rpartition(".")[0]
        while around and len(self._styles_around(around)) < 2:
            around = around.rpartition(".")[0]
        styles = self._styles_around(around)
        shown = ", ".join(f'"{one}": "{style}"' for one, style in list(styles.items())[:6])
        advice = (
            f"name {name} with style 'partial' if it works on this rank's heads or columns only"
            if remedy
            else "a matrix that joins queries, keys and values is 'columns:3', one of gate and value 'columns:2'; "
            "columns whose outputs something needs in full are 'gathered_columns', with 'sliced_rows' after them; or "
            f"leave {around or 'these modules'} out of the tensor plan"
        )
        if uneven := self._find_uneven_heads(name):
            advice = f"{uneven}; {advice}"
        return (
            f"a split model must compute what the whole one does, but {name or 'the model'} "
            f"({type(part).__name__}) {what} under the tensor plan {{{shown}}}; {advice}"
        )

    def _find_uneven_heads(self, name: str) -> str:
        """Return which number of heads around a module is no multiple of the axis, as a sentence."""
        words = name.split(".")
        for end in range(len(words), -1, -1):
            part = self._module.get_submodule(".".join(words[:end]))
            counts = vars(part) | vars(vars(part).get("config", torch.nn.Identity()))
            for key in COUNTS:
                number = counts.get(key)
                if "head" in key and type(number) is int and number % self._size:
                    return f"{key}({number}) must be a multiple of tensor({self._size}) to share heads out"
        return ""

    def _styles_around(self, name: str) -> dict[str, str]:
        prefix = f"{name}." if name else ""
        return {one: style for one, style in self._plan.styles.items() if one == name or one.startswith(prefix)}


def _floats(output: Any) -> list[Tensor]:
    return [one for one in list_tensors(output) if one.is_floating_point()]
