"""Comparison of a model that has parts of its sequences with the whole one, before it trains."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.torch_group import is_lost_peer
from paceline.data.batch import call, list_tensors, map_tensors
from paceline.errors import PacelineError, SettingsError
from paceline.parallel.counters import NUM_LATER, find_counters, set_numbers
from paceline.parallel.mesh import Mesh
from paceline.parallel.padding import NotingContext, hide_tokens
from paceline.parallel.split_forward import (
    CONTEXT_ADVICE,
    Context,
    check_masks,
    find_forwards,
    names_of_calls,
    split_forwards_in,
)
from paceline.parallel.split_inputs import MASK, MaskCheck, hides_before_others, join_tokens
from paceline.parallel.tensor_proof import relative_error
from paceline.parallel.trial import is_random, restored, training, vary

_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Largest relative difference of a result, for sums in another order; one of something else is larger."""
_HALF_TOLERANCE = 0.03
_FLOOR = 1e-3
"""Part of the mean gradient below which a gradient is rounding, such as that of the bias of attention's keys."""

Place = tuple[str, int, int]
"""Name of a module, the number of its call, and of the tensor that it returned."""


class ContextCheck:
    """Comparison of a model on parts of sequences with itself on whole ones: results, gradients, and what it keeps.

    In evaluation and, unless that draws random numbers even without dropout, in training: on a sample, on one of other
    values, and with what each forward counts where it will be after many; in evaluation also where its masks hide
    tokens at the front and at the back. Results of hidden tokens are not compared: no other token sees them. It costs
    about fifteen forward passes of the sample, ten more with a mask, and four backward, and on each rank memory for a
    copy of the parameters and two of gradients.

    Args:
        module: Model, whose forwards `split_forwards` has replaced.
        mesh: Mesh of the layout.
        context: Access to split sequences, which drops nothing.
        split: Function from a batch of whole sequences, or one tensor, to this rank's part.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, context: Context, split: Callable[[Any], Any]) -> None:
        self._module = module
        self._mesh = mesh
        self._context = context
        self._split = split
        self._num_samples = self._num_tokens = 0
        self._seen_BT = torch.ones(0, 0, dtype=torch.bool)

    def compare(self, sample: Any) -> MaskCheck | None:
        """Raise `SettingsError` on all ranks with the name of what is another one with split sequences.

        Returns:
            Check of the masks of batches, if some make the model another one.
        """
        self._num_samples, self._num_tokens = next(one.shape[:2] for one in list_tensors(sample) if one.dim() > 1)
        samples = [one for one in (sample, vary(sample)) if self._runs(one)]
        for one in samples:
            self._compare(one, "")
        refusals = self._compare_hidden(sample)
        with training(self._module):
            is_noisy = any(self._mesh.world.gather_documents(is_random(self._module, sample), name="random forward"))
        mode, when = (training(self._module, measures=True), " in training") if not is_noisy else (nullcontext(), "")
        with mode:
            for one in samples:
                self._compare(one, when, trains=True)
            counters = find_counters(self._module, lambda: call(self._module, map_tensors(torch.clone, sample)))
            with restored(self._module):
                set_numbers(counters)
                if counters and self._runs(sample):
                    self._compare(sample, f" after {NUM_LATER} steps")
        return MaskCheck(self._mesh, self._split, refusals) if refusals else None

    def _compare_hidden(self, sample: Any) -> dict[bool, str]:
        """Compare where masks hide tokens, and return refusals for batches with such masks: see `MaskCheck`.

        A model that takes a mask is compared with one even if the sample has none, as batches may have.
        """
        masks = [key for key in sample if "mask" in key] if isinstance(sample, Mapping) else []
        is_added = not masks and any(MASK in forward.positions for forward in find_forwards(self._module))
        if is_added:
            device = next(one.device for one in list_tensors(sample))
            sample = {**sample, MASK: torch.ones(self._num_samples, self._num_tokens, dtype=torch.int64, device=device)}
        refusals: dict[bool, str] = {}
        for one, where in hide_tokens(sample):
            if not self._runs(one):
                continue
            try:
                check_masks(self._module, one)
                self._compare(one, where)
            except SettingsError as error:
                is_before = (is_added or masks == [MASK]) and hides_before_others(one[MASK] != 0)
                if not (is_added or is_before):
                    raise
                refusals[is_before] = str(error)
        return refusals

    def _runs(self, sample: Any) -> bool:
        """Return whether the whole model takes a sample, and makes numbers of it."""
        try:
            outputs = list_tensors(self._run(sample, None, lambda *_: None))
        except Exception:  # such as an index out of range, the same on all ranks
            return False
        return all(bool(output.isfinite().any()) for output in outputs if output.is_floating_point())

    def _run(self, sample: Any, context: Context | None, take: Callable[[Place, Tensor], None]) -> Any:
        torch.manual_seed(0)
        with (
            torch.no_grad(),
            restored(self._module),
            split_forwards_in(self._module, context),
            _outputs(self._module, take),
        ):
            return call(self._module, map_tensors(torch.clone, sample))

    def _compare(self, sample: Any, when: str, *, trains: bool = False) -> None:
        expected: dict[Place, Tensor] = {}
        different: dict[str, str] = {}

        def note(place: Place, output: Tensor) -> None:
            expected[place] = output.detach().clone()  # what comes after may change it in place

        def compare(place: Place, output: Tensor) -> None:
            if said := self._find_gap(expected.get(place), output.detach(), is_result=not place[0]):
                different.setdefault(place[0], said)

        self._seen_BT = self._find_seen(sample)
        whole_state, whole_gradients = self._train(sample, None, note, trains=trains)
        with self._explaining():
            state, gradients = self._train(self._split(sample), self._context, compare, trains=trains)
        if said := _find_without_tokens(expected, self._num_tokens):
            different[""] = said
        for name in whole_state.keys() & state.keys():
            owner, _, leaf = name.rpartition(".")
            if said := self._find_gap(whole_state[name], state[name], kept=leaf):
                different.setdefault(owner, said)
        different |= self._compare_gradients(whole_gradients, gradients, different) if trains else {}
        said = self._describe(different, when) if different else ""
        if first := next(filter(None, self._mesh.world.gather_documents(said, name="split forward")), ""):
            raise SettingsError(first)

    def _find_seen(self, sample: Any) -> Tensor:
        """Return which tokens of whole sequences are seen by attention, in a run on this rank's part of a sample."""
        context = NotingContext(self._context)
        with self._explaining():
            self._train(self._split(sample), context, lambda *_: None, trains=False)
        device = next(one.device for one in list_tensors(sample))
        shape = torch.Size((self._num_samples, self._num_tokens // self._mesh.size("context")))
        return join_tokens(context.find_seen(shape).to(device), self._mesh, self._split)

    def _find_known(self, tensor: Tensor) -> Tensor:
        """Return which numbers of a result of whole sequences are of tokens that attention sees, or of no token."""
        if tensor.shape[:2] != self._seen_BT.shape:
            return torch.ones_like(tensor, dtype=torch.bool)
        return self._seen_BT.to(tensor.device).view(*self._seen_BT.shape, *[1] * (tensor.dim() - 2)).expand_as(tensor)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Tell an error of a rank's part as one of the module that raised it; all ranks have the same."""
        inside = [""]
        try:
            with names_of_calls(self._module, inside):
                yield
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            if isinstance(error, PacelineError) or (isinstance(error, RuntimeError) and is_lost_peer(error)):
                raise
            raise SettingsError(
                f"a module must run on parts of its sequences for context({self._mesh.size('context')}), but "
                f"{inside[-1] or type(self._module).__name__} says {type(error).__name__}: "
                f"{str(error).splitlines()[0]}; take as many entries of a table as there are tokens "
                f"(table[:, : x.shape[1]]), or {CONTEXT_ADVICE}"
            ) from error

    def _train(
        self, sample: Any, context: Context | None, take: Callable[[Place, Tensor], None], *, trains: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run forward, and backward if it `trains`; return what the model keeps, and the gradients of parameters."""
        torch.manual_seed(0)
        parameters = dict(self._module.named_parameters())
        before = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        module = self._module
        try:
            with torch.set_grad_enabled(trains), restored(module), split_forwards_in(module, context):
                with _outputs(module, take):
                    outputs = list_tensors(call(module, map_tensors(torch.clone, sample)))
                state = _copy_state(module)
                if trains:
                    self._run_backward([output for output in outputs if output.requires_grad], context is not None)
            return state, {name: one.grad for name, one in parameters.items() if one.grad is not None}
        finally:
            for name, parameter in parameters.items():
                parameter.grad = before[name]

    def _run_backward(self, outputs: list[Tensor], is_split: bool) -> None:
        """Run backward from a sum of all tokens' outputs with fixed weights."""
        terms = []
        for number, output in enumerate(outputs):
            shape = list(output.shape)
            if is_split and len(shape) > 1:
                shape[1] = self._num_tokens
            weights = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(output)
            weights = weights.where(self._find_known(weights), 0)
            weights = self._split(weights) if is_split and len(shape) > 1 else weights
            terms.append((output * weights).sum() if weights.shape == output.shape else output.sum())
        if terms:
            torch.stack(terms).sum().backward()

    def _find_gap(self, whole: Tensor | None, output: Tensor, *, is_result: bool = False, kept: str = "") -> str:
        """Return how a rank's part of a result is another one than that of the whole; empty if it is not."""
        if whole is None:
            return ""
        has_tokens = whole.dim() > 1 and whole.shape[1] == self._num_tokens
        if has_tokens and whole.dim() == 2 and len(whole) != self._num_samples:
            return ""  # tokens of all samples, as wide as a sample is long
        is_known = self._find_known(whole)
        if has_tokens and not (kept and output.shape == whole.shape):
            wanted, is_known = self._split(whole), self._split(is_known)
        elif kept:
            wanted = whole
        else:
            return ""
        if output.shape != wanted.shape:
            is_clear = not kept and (is_result or whole.shape.count(self._num_tokens) == 1)
            shapes = f"{tuple(output.shape)} and not {tuple(wanted.shape)}"
            return f"an output of another shape with split sequences, {shapes}" if is_clear else ""
        is_known = is_known & (wanted.isfinite() | output.isfinite())
        gap = (output - wanted).where(is_known, 0).abs().max() if output.numel() else torch.zeros(())
        size = wanted.where(is_known & wanted.isfinite(), 0).abs().max() if output.numel() else gap
        if gap <= _tolerance(wanted.dtype) * size.clamp(min=1e-6):
            return ""
        return f"another {f'value of {kept}' if kept else 'output'} with split sequences, by {float(gap):.3g}"

    def _compare_gradients(
        self, whole: Mapping[str, Tensor], part: Mapping[str, Tensor], found: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the module whose gradients, summed over the ranks, are others, and what it has."""
        group = self._mesh.group("context")
        squares = sum(float(gradient.double().square().sum()) for gradient in whole.values())
        mean = (squares / max(sum(gradient.numel() for gradient in whole.values()), 1)) ** 0.5
        different: dict[str, str] = {}
        for name, parameter in self._module.named_parameters():
            if not parameter.requires_grad:
                continue
            summed = part[name].contiguous() if name in part else torch.zeros_like(parameter)
            group.all_reduce(summed, name="gradient of split sequences").wait()
            expected = whole.get(name, torch.zeros_like(parameter))
            error = relative_error(summed, expected, _FLOOR * mean * parameter.numel() ** 0.5)
            if error > 10 * _tolerance(parameter.dtype):
                different[name.rpartition(".")[0]] = f"another gradient of {name} with split sequences, by {error:.1e}"
        last = list(different.items())[-1:]  # in backward errors go on to what is before
        return {owner: what for owner, what in last if not found}

    def _describe(self, different: Mapping[str, str], when: str) -> str:
        """Return the refusal of a model, by the first module that differs."""
        name, what = next(iter(different.items()))
        rule = "that looks at other tokens must do so by F.scaled_dot_product_attention"
        if isinstance(self._module.get_submodule(name), nn.Embedding):
            rule = (
                "must look up tokens as they come, and positions by the argument position_ids or "
                "torch.arange(num_tokens),"
            )
        owner = name or type(self._module).__name__
        size = self._mesh.size("context")
        return f"a module {rule} for context({size}), but {owner} has {what}{when}; {CONTEXT_ADVICE}"


def _find_without_tokens(outputs: Mapping[Place, Tensor], num_tokens: int) -> str:
    """Return which of a model's own outputs is not one of each token, of whose parts a loss would make another one."""
    results = {place[2]: output for place, output in outputs.items() if not place[0]}
    is_cache = {number: number > 0 and one.dim() == 4 and one.shape[2] == num_tokens for number, one in results.items()}
    shapes = [
        str(tuple(output.shape))
        for number, output in results.items()
        if not is_cache[number] and (output.dim() < 2 or output.shape[1] != num_tokens)
    ]
    if results and not shapes:
        return ""
    return f"an output without a dim of tokens, {', '.join(shapes) or 'nothing'}"


def _copy_state(module: nn.Module) -> dict[str, Tensor]:
    """Return what a module keeps: floating buffers, and attributes that are numbers or tensors of such."""
    state: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        for key, value in [*vars(part).items(), *part._buffers.items()]:
            value = torch.tensor(value, dtype=torch.float64) if type(value) is float else value
            if isinstance(value, Tensor) and value.is_floating_point():
                state[f"{name}.{key}"] = value.detach().clone()
    return state


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCES.get(dtype, _HALF_TOLERANCE)


@contextmanager
def _outputs(module: nn.Module, take: Callable[[Place, Tensor], None]) -> Iterator[None]:
    """While active, `take` gets each tensor that a module returns, with its place."""
    counts: Counter[str] = Counter()

    def hook(name: str, output: Any) -> None:
        counts[name] += 1
        for number, tensor in enumerate(one for one in list_tensors(output) if one.is_floating_point()):
            take((name, counts[name], number), tensor)

    handles = [
        part.register_forward_hook(lambda _part, _args, output, name=name: hook(name, output))
        for name, part in module.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
