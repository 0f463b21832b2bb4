"""Proof, on one process, that the ranks' parts of a block would add up to it: each is run in turn, on a sample."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.data.batch import call, list_tensors, map_tensors
from paceline.errors import SettingsError
from paceline.parallel.counters import NUM_LATER, Numbers, find_counters, set_numbers
from paceline.parallel.split_forward import names_of_calls
from paceline.parallel.tensor_styles import COLUMNS, Style, is_linear, is_transposed, own_part
from paceline.parallel.trial import CACHES, restored, training

COUNTS = (
    *("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads", "n_local_heads"),
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads"),
    *("embed_dim", "embedding_dim", "hidden_size", "hidden_dim", "split_size", "all_head_size", "inner_dim", "d_model"),
    *("d_inner", "dim", "width", "n_embd", "kv_dim", "q_dim", "intermediate_size"),
)
"""Names of attributes that count heads or features, of which a rank may have to see its own number."""

Attributes = Mapping[str, Mapping[str, Any]]

_SCALE = 10.0
"""Factor by which activations between maps are made larger."""
_LARGER = f"where the activations in it are {_SCALE:.0f} times larger"


@dataclass(frozen=True)
class Pair:
    """Linear maps on one input, the next map after them, and the smallest block around all.

    Args:
        columns: Names of the first maps; those of the alternatives to try if these fail come in other pairs.
        rows: Name of the map after them.
        block: Name of the block.
        trace: Run in which they were found.
    """

    columns: tuple[str, ...]
    rows: str
    block: str
    trace: "Trace"

    @property
    def signature(self) -> tuple[Any, ...]:
        """What blocks that are built alike have in common."""
        block = self.trace.modules[self.block]
        names = tuple(name.removeprefix(self.block) for name in (*self.columns, self.rows))
        shapes = tuple(tuple(parameter.shape) for parameter in block.parameters())
        return (type(block), names, shapes, repr(block))


class Trace:
    """The first call of each module in a run of the model, and the linear maps in the order of their calls."""

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        self.modules = dict(module.named_modules())
        self.calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.counters: Numbers = []
        """Numbers that each forward in training moves, with what they will be after many."""
        self.linear: list[tuple[str, Tensor]] = []
        self._outputs: dict[str, tuple[Tensor, int]] = {}
        self._repeated: set[str] = set()
        uses = _UseRecorder(module)
        with ExitStack() as stack:
            for name, part in self.modules.items():
                stack.callback(part.register_forward_pre_hook(self._record(name), with_kwargs=True).remove)
                if is_linear(part):
                    stack.callback(part.register_forward_hook(self._keep_output(name)).remove)
            stack.enter_context(explaining_sample(module))
            stack.enter_context(names_of_calls(module, uses.inside))
            with torch.enable_grad(), uses:  # else torch's encoder layers take a path around their children
                call(module, inputs)
        with explaining_sample(module), training(module):
            self.counters = find_counters(module, lambda: call(module, map_tensors(torch.clone, inputs)))
        self.linear = [(name, given) for name, given in self.linear if name not in self._repeated | uses.elsewhere]
        self.changed = {name for name, (output, version) in self._outputs.items() if output._version != version}
        """Linear maps whose output is changed in place, which autograd forbids for gathered columns."""

    def _record(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if name in self.calls:
                self._repeated.add(name)
                return
            self.calls[name] = (args, {key: None if key in CACHES else value for key, value in kwargs.items()})
            # A vector has no samples to join, and a matrix that is computed is no parameter to split.
            is_own = isinstance(module._parameters.get("weight"), nn.Parameter)
            if is_linear(module) and is_own and args and isinstance(args[0], Tensor) and args[0].dim() > 1:
                self.linear.append((name, args[0]))

        return hook

    def _keep_output(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                self._outputs.setdefault(name, (output, output._version))

        return hook

    def find_block(self, names: Iterable[str]) -> str:
        """Return the name of the smallest module around some that is called itself, and once."""
        paths = [name.split(".")[:-1] for name in names]
        common = []
        for words in zip(*paths, strict=False):
            if len(set(words)) > 1:
                break
            common.append(words[0])
        while common and (".".join(common) not in self.calls or ".".join(common) in self._repeated):
            common.pop()
        return ".".join(common)


class _UseRecorder(TorchFunctionMode):
    """Mode that finds linear maps whose weights are used outside of their own forward too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside: list[str] = [""]
        """Names of the modules that are running, the innermost last."""
        self.elsewhere: set[str] = set()
        """Names of these maps."""
        self._owners: dict[int, set[str]] = {}
        for name, part in model.named_modules():
            for parameter in part.parameters(recurse=False):
                self._owners.setdefault(id(parameter), set()).add(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        result = func(*args, **(kwargs or {}))
        if list_tensors(result):
            for one in list_tensors((args, kwargs)):
                owners = self._owners.get(id(one), set())
                if owners and self.inside[-1] not in owners:
                    self.elsewhere |= owners
        return result


def list_pairs(trace: Trace) -> list[Pair]:
    """Return candidates in the order of the run; each map is in several."""
    groups: list[tuple[list[str], Tensor]] = []
    for name, given in trace.linear:
        if groups and groups[-1][1].data_ptr() == given.data_ptr() and groups[-1][1].shape == given.shape:
            groups[-1][0].append(name)
        else:
            groups.append(([name], given))
    pairs = []
    for index in range(1, len(groups)):
        rows = groups[index][0]
        if len(rows) > 1:
            continue
        for first in (index - 1, index - 2):  # attention to another sequence has two inputs
            if first >= 0:
                columns = tuple(name for names, _ in groups[first:index] for name in names)
                pairs.append(Pair(columns, rows[0], trace.find_block([*columns, rows[0]]), trace))
    return pairs


def list_attributes(pair: Pair, size: int) -> Iterator[dict[str, Mapping[str, Any]]]:
    """Yield the attributes that a block's modules may have to see divided: none, one, two or three of their names."""
    counts: dict[str, dict[str, int]] = {}
    for name, module in pair.trace.modules.items():
        is_inside = not pair.block or name == pair.block or name.startswith(f"{pair.block}.")
        if is_inside and not is_linear(module):
            for key, value in vars(module).items():
                if key in COUNTS and type(value) is int and value > 1 and value % size == 0:
                    counts.setdefault(key, {})[name] = value // size
    for number in range(4):
        for keys in combinations(counts, number):
            chosen: dict[str, dict[str, Any]] = {}
            for key in keys:
                for name, value in counts[key].items():
                    chosen.setdefault(name, {})[key] = value
            yield dict(chosen)


def prove(pair: Pair, styles: Mapping[str, Style], attributes: Attributes, size: int) -> list[str] | None:
    """Return None if the ranks' parts do not add up, else the modules whose whole weights see a part of activations."""
    held = {id(p) for name in styles for p in pair.trace.modules[name].parameters()}
    block = pair.trace.modules[pair.block]
    others = {name: p for name, p in block.named_parameters() if id(p) not in held and p.requires_grad}
    results: list[tuple[Tensor, list[Tensor | None]]] = []
    try:
        whole, gradients, ends = _run(pair, others.values())
        for place in range(size):
            with _on_rank(pair.trace.modules, styles, attributes, place, size):
                output, parts, own_ends = _run(pair, others.values(), whole)
            if not _are_alike(own_ends, ends):
                return None  # what only a part is of is used elsewhere too
            results.append((output, parts))
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):  # shapes that do not fit: no proof
        return None
    if any(result.shape != whole.shape for result, _ in results) or not is_close(sum(r for r, _ in results), whole):
        return None
    partial: set[str] = set()
    for index, name in enumerate(others):
        parts = [given[index] for _, given in results]
        expected = gradients[index]
        if expected is None and all(part is None for part in parts):
            continue
        if expected is None or any(part is None for part in parts) or not is_close(sum(parts), expected):  # type: ignore[arg-type]
            return None
        partial.add(".".join(word for word in (pair.block, name.rpartition(".")[0]) if word))
    return sorted(partial)


def find_variation(pair: Pair, styles: Mapping[str, Style], attributes: Attributes, size: int) -> str:
    """Return where the ranks' parts of a proved block do not add up any more; empty if they always do.

    Activations between its maps are made larger, of either sign, as training may make them, and numbers that each
    forward moves are set to what they will be after many. It is also run as in training, unless it draws other random
    numbers there.
    """
    block = pair.trace.modules[pair.block]
    held = {id(holder) for part in block.modules() for holder in (vars(part), part._buffers)}
    counters = [one for one in pair.trace.counters if id(one[0]) in held]
    tries: list[tuple[float, Numbers, str]] = [(sign * _SCALE, [], _LARGER) for sign in (1.0, -1.0)]
    tries += [(1.0, counters, f"after {NUM_LATER} forwards")] if counters else []

    def adds_up(scale: float, numbers: Numbers) -> bool:
        try:
            whole, _, ends = _run(pair, (), scale=scale, numbers=numbers)
            if not ends or not all(one.isfinite().all() for one in (whole, ends[0])):
                return True  # no values that training reaches
            parts = []
            for place in range(size):
                with _on_rank(pair.trace.modules, styles, attributes, place, size):
                    output, _, own_ends = _run(pair, (), whole, scale=scale, numbers=numbers)
                if not _are_alike(own_ends, ends):
                    return False
                parts.append(output)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            return False
        return all(part.shape == whole.shape for part in parts) and is_close(sum(parts), whole)

    for scale, numbers, when in tries:
        if not adds_up(scale, numbers):
            return when
    with training(block):
        return "" if _is_random(pair) or adds_up(1.0, []) else "in training"


def _is_random(pair: Pair) -> bool:
    with torch.random.fork_rng(devices=[]):
        found = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            output, _, ends = _run(pair, ())
            found.append([output, *ends])
    return not _are_alike(*found)


def _are_alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether a block returned the same; later ones of its results may be of a rank's own heads."""
    if len(some) != len(others):
        return False
    pairs = enumerate(zip(some, others, strict=True))
    return all(is_close(one, other) if one.shape == other.shape else number > 0 for number, (one, other) in pairs)


def prove_alone(trace: Trace, name: str, style: Style, size: int) -> bool:
    """Return whether the ranks' parts of a linear map, for its own first input, make what all of it does."""
    if style == "gathered_columns" and name in trace.changed:
        return False
    module, ((given, *args), kwargs) = trace.modules[name], trace.calls[name]
    try:
        with torch.no_grad(), restored(module):
            whole, parts = module(given, *args, **kwargs), []
            for place in range(size):
                own = given.chunk(size, -1)[place] if style == "sliced_rows" else given
                with _on_rank(trace.modules, {name: style}, {}, place, size):
                    parts.append(module(own, *args, **kwargs))
        made = sum(parts) if style == "sliced_rows" else torch.cat(parts, -1)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return False
    return made.shape == whole.shape and is_close(made, whole)


def _run(
    pair: Pair,
    others: Iterable[nn.Parameter],
    added_up: Tensor | None = None,
    *,
    scale: float = 1.0,
    numbers: Numbers = (),
) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
    """Return the output of a pair's last map, the gradients of the weights between the maps, and the block's outputs.

    Args:
        pair: The maps and their block.
        others: The weights.
        added_up: Sum of what the last map returns on all ranks, which goes on from there; None if this is all of it.
        scale: Factor of the inputs of the first maps.
        numbers: Attributes and buffers of the block, with the values that they have meanwhile.
    """
    modules = pair.trace.modules
    args, kwargs = pair.trace.calls[pair.block]
    parameters = list(others)

    reached: list[Tensor] = []

    def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        reached.append(output.clone())  # what comes after may change it in place
        return None if added_up is None else added_up.clone()

    def detach(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        given = (one.detach() if isinstance(one, Tensor) else one for one in args)
        return tuple(one if scale == 1.0 or not isinstance(one, Tensor) else one * scale for one in given)

    with restored(modules[pair.block]), ExitStack() as stack, torch.enable_grad():
        set_numbers(numbers)
        stack.callback(modules[pair.rows].register_forward_hook(leave).remove)
        for name in pair.columns:
            stack.callback(modules[name].register_forward_pre_hook(detach).remove)
        ends = [one.detach() for one in list_tensors(modules[pair.block](*args, **kwargs)) if one.is_floating_point()]
        (output,) = reached
        if not output.requires_grad or not parameters:
            return output.detach(), [None] * len(parameters), ends
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        gradients = torch.autograd.grad(output, parameters, weights, allow_unused=True)
        return output.detach(), list(gradients), ends


@contextmanager
def _on_rank(
    modules: Mapping[str, nn.Module], styles: Mapping[str, Style], attributes: Attributes, place: int, size: int
) -> Iterator[None]:
    """While active, some modules have only one rank's part of their parameters, and see its attributes."""
    kept: list[tuple[dict[str, Any], str, Any]] = []

    def put(holder: dict[str, Any], key: str, value: Any) -> None:
        kept.append((holder, key, holder[key]))
        holder[key] = value

    try:
        for name, style in styles.items():
            module = modules[name]
            for key, parameter in list(module._parameters.items()):
                if parameter is not None:
                    part = own_part(style, module, key, parameter.detach(), place, size)
                    part = (
                        torch.zeros_like(part) if style in ("rows", "sliced_rows") and key == "bias" and place else part
                    )
                    put(module._parameters, key, nn.Parameter(part, requires_grad=False))
            if is_transposed(module) and style in COLUMNS:
                put(vars(module), "nf", vars(module)["nf"] // size)
        for name, seen in attributes.items():
            for key, value in seen.items():
                put(vars(modules[name]), key, value)
        yield
    finally:
        for holder, key, value in reversed(kept):
            holder[key] = value


@contextmanager
def explaining_sample(module: nn.Module) -> Iterator[None]:
    """While active, an error of the whole model is told as one of its sample."""
    try:
        yield
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        raise SettingsError(
            "a model must run on the sample for a tensor axis, which is planned and checked with it, but this "
            f"{type(module).__name__} raised {type(error).__name__}: {error}; give parallelize(sample=...) what its "
            "forward takes: a tensor, a tuple, or a mapping of arguments"
        ) from error


def is_close(one: Tensor | int, other: Tensor) -> bool:
    """Return whether two tensors are equal up to the order of summation."""
    return bool(relative_error(torch.as_tensor(one), other) <= tolerance(other.dtype))


def relative_error(one: Tensor, other: Tensor, floor: float = 0.0) -> float:
    """Return the norm of a difference, as a part of the norm of the `other`, or of `floor` if that is larger."""
    difference = float((one.double() - other.double()).norm())
    size = max(float(other.double().norm()), floor)
    if math.isnan(difference):  # masked scores of minus infinity give equal NaN
        return 0.0 if torch.equal(one.isnan(), other.isnan()) else math.inf
    return difference / size if size else (math.inf if difference else 0.0)


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative error that another order of summation explains."""
    return min(3 * math.sqrt(torch.finfo(dtype).eps), 0.1) if dtype.is_floating_point else 0.0
