"""The operations of a construction, recorded on tensors without memory, and run again for some of them."""

import gc
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from paceline.parallel.deferred.drawing import BLIND, FILLS, GROUP, draw_at, fills_in_order
from paceline.parallel.deferred.empty_storages import EmptyStorages, key_of
from paceline.parallel.deferred.generator import cost
from paceline.parallel.deferred.operators import (
    REPLACING,
    asks_for_values,
    checks_indices,
    checks_values,
    computes_otherwise,
    has_size_by_values,
    is_integer,
    is_known,
    is_lazy_view,
    is_view,
    list_written,
    makes_in_memory,
)
from paceline.parallel.deferred.proof import Prover
from paceline.parallel.deferred.reference import Reference, is_contiguous, join_spans
from paceline.parallel.deferred.refusal import UndeferrableError, explain
from paceline.parallel.deferred.stream import Moment, RandomStream

_MAX_CONSTANT_BYTES = 64 * 2**20
"""Bytes of tensors with values that may be kept; a model that reads more of them gains nothing from being deferred."""
_CONSTANT_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}
_POINTWISE = {
    torch.ops.aten.mul_.Scalar,
    torch.ops.aten.add_.Scalar,
    torch.ops.aten.sub_.Scalar,
    torch.ops.aten.div_.Scalar,
    torch.ops.aten.mul_.Tensor,
    torch.ops.aten.add_.Tensor,
    torch.ops.aten.sub_.Tensor,
    torch.ops.aten.div_.Tensor,
    torch.ops.aten.erfinv_.default,
    torch.ops.aten.clamp_.default,
}
"""Operations on each element alone, in place."""


@dataclass(frozen=True)
class _Operation:
    """One recorded operation."""

    function: Any
    leaves: Sequence[Any]
    """Arguments, flat: references instead of recorded tensors."""
    structure: Any
    """Structure of the arguments."""
    made: Sequence[tuple[int, Reference]]
    """Places among the results of tensors in new storages."""
    spans: dict[int, tuple[int, int]]
    """Storages that it writes to or makes, and the bytes of each, from the first to the end."""
    moment: Moment | None = None
    """Moment of the random stream before it, if it draws."""
    num_words: int = 0
    """Number of words that it draws, if that is known."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """Torch's default dtype as it is recorded, which decides what whole numbers are turned into."""

    @property
    def references(self) -> list[Reference]:
        """Views of storages among its arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Reference)]

    @property
    def reads(self) -> set[int]:
        """Storages that it needs."""
        return {reference.storage for reference in self.references}

    @property
    def written(self) -> set[int]:
        """Storages that it writes to or makes."""
        return set(self.spans)

    def run(self, storages: dict[int, torch.UntypedStorage], stream: RandomStream) -> None:
        """Run on storages with values, and add those that it makes."""
        leaves = [leaf.of(storages[leaf.storage]) if isinstance(leaf, Reference) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            results, _ = tree_flatten(
                draw_at(stream, self.moment, lambda: self.function(*args, **kwargs), self.num_words)
            )
        finally:
            torch.set_default_dtype(default_dtype)
        for place, reference in self.made:
            result = results[place]
            assert (result.shape, result.stride(), result.storage_offset()) == reference.geometry, (
                f"{self.function} must make the tensor that it was recorded with"
            )
            storages[reference.storage] = result.untyped_storage()


class Recording(TorchDispatchMode):
    """Context in which tensors are made without memory, and what would give them values is recorded.

    They are torch's own tensors on the CPU, whatever is asked of them: only their storages have no memory. Random
    numbers are only counted; `settle` then leaves the generator where it would have ended. A value that the code asks
    for is computed.

    Args:
        is_generator_held: Whether code may ask torch's generator for its state at any time, which then is kept real.

    Raises:
        UndeferrableError: An operation cannot be recorded; others raise whatever torch's `FakeTensorMode` raises.
    """

    def __init__(self, *, is_generator_held: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_generator_held = is_generator_held
        self._storages = EmptyStorages()
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}
        self._constant_bytes = 0
        self._stream, self._prover = RandomStream(), Prover()
        self._function = ""
        """Name of torch's function that runs, as the code that builds the model called it."""
        self.refusal: UndeferrableError | None = None
        """Reason for which the construction cannot be recorded, if any; code of the model may have caught the error."""
        self.is_over = False
        """Whether the construction has ended, so that what its threads do afterwards is their own matter."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip Dynamo, torch would import it first, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation that makes or concerns tensors without memory, and run all others."""
        kwargs = dict(kwargs or {})
        leaves, _ = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        has_device = any(argument.name == "device" for argument in func._schema.arguments)
        is_concerned = any(map(self._storages.knows, tensors))
        if not is_concerned and (not makes_in_memory(kwargs.get("device"), tensors) if has_device else tensors):
            if torch.Tag.nondeterministic_seeded in func.tags:
                self._stream.settle()
            return func(*args, **kwargs)  # of tensors that have values anyway, or none that anybody needs
        with self.watch(func):
            return self._dispatch(func, args, kwargs, has_device=has_device)

    @contextmanager
    def watch(self, what: Any) -> Iterator[None]:
        """Note what is raised inside: with values it might not be, and the code that builds the model may catch it."""
        before = self._function
        if isinstance(what, str):
            self._function = what
        try:
            yield
        except Exception as error:
            self.refusal = self.refusal or explain(error, what)
            raise
        finally:
            self._function = before

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any], *, has_device: bool) -> Any:
        """Record an operation that makes or concerns tensors without memory."""
        if func.overloadpacket in REPLACING:
            raise UndeferrableError(f"it replaces the memory of a tensor ({func})")
        if any(isinstance(leaf, Tensor) for leaf in tree_flatten((args, kwargs))[0]) and not is_known(func):
            raise UndeferrableError(f"it calls the operator {func}, which is not torch's own and may write anywhere")
        if computes_otherwise(func, self._function):
            raise UndeferrableError(
                f"it calls {self._function or func}, of which torch computes other last digits where it is recorded"
            )
        if is_lazy_view(func, tree_flatten((args, kwargs))[0]):
            raise UndeferrableError(f"it conjugates or negates a tensor without memory of its own ({func})")
        if is_view(func):
            return func(*args, **kwargs)
        device = kwargs.get("device") if has_device else None
        if device is not None and torch.device(device).type != "cpu":
            raise UndeferrableError(f"it makes tensors on the device {device}, not in host memory")
        if kwargs.get("generator") is not None:
            raise UndeferrableError("it draws random numbers from a generator of its own")
        if asks_for_values(func) or self._writes_outside(func, args, kwargs):
            return func(*tree_map(self.with_values, args), **tree_map(self.with_values, kwargs))
        self._check_values(func, args, kwargs)
        return self._record(func, args, kwargs, has_device=has_device)

    def refer(self, tensor: Tensor) -> Reference | None:
        """Return the reference of a tensor that was recorded, None of another."""
        return self._refer(tensor) if self._storages.knows(tensor) else None

    def _refer(self, tensor: Tensor) -> Reference:
        return Reference(key_of(tensor), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def knows(self, held: Tensor | torch.UntypedStorage) -> bool:
        """Whether a tensor, or a storage, is one of those without memory."""
        return self._storages.knows(held)

    def copy_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of a storage without memory, which is one, too."""
        return self._storages.view(storage).clone().untyped_storage()

    def release(self) -> None:
        """Make tensors harmless that are still held, such as by the traceback of an error, whose text may show them."""
        self._storages.release()

    def fill_held(self) -> bool:
        """Give what is still held its values; return False if they are random, so that building again draws others.

        Also if something else than a tensor holds some, such as a storage.
        """
        held, chosen = {key: (0, self._storages.sizes[key]) for key in self._storages.list_held()}, set[int]()
        self._choose(held, chosen)
        if any(self._operations[place].moment is not None for place in chosen):
            return False
        return self._storages.fill(self._replay(held))

    def is_held(self) -> bool:
        """Whether anybody else holds a tensor without memory, or a storage of one."""
        gc.collect()
        return self._storages.is_held()

    def with_values(self, leaf: Any) -> Any:
        """Return an argument with the values that it would have."""
        if (reference := self.refer(leaf) if isinstance(leaf, Tensor) else None) is None:
            return leaf
        with _disable_current_modes():
            return self.compute([reference])[0]

    def compute(self, references: Sequence[Reference]) -> list[Tensor]:
        """Return the values of tensors, in the memory of all that they depend on."""
        storages = self._replay(join_spans(references))
        return [reference.of(storages[reference.storage]) for reference in references]

    def compute_rows(self, reference: Reference, begin: int, num_elements: int) -> Tensor | None:
        """Return some consecutive elements of a tensor, in no more memory than they take.

        Returns:
            None if that is not possible: if not every element was made by itself, in its order.
        """
        chain = self._list_pointwise(reference)
        if chain is None:
            return None
        first = begin // GROUP * GROUP
        end = min(reference.num_elements, -(-(begin + num_elements) // GROUP) * GROUP)
        part = torch.empty(end - first, dtype=reference.dtype)
        for operation in chain:
            args, kwargs = tree_unflatten(list(operation.leaves), operation.structure)
            moment, num_drawn = operation.moment, 0
            if moment is not None:
                words = cost(getattr(Tensor, FILLS[operation.function]), reference.dtype, 0)
                assert words is not None
                moment, num_drawn = Moment(moment.base, moment.num_words + words[0] * first), words[0] * len(part)

            def run(a: Any = args, k: Any = kwargs, o: _Operation = operation) -> Any:
                return o.function(part, *a[1:], **k)

            draw_at(self._stream, moment, run, num_drawn)
        part = part[begin - first : begin - first + num_elements]
        return part.clone() if len(part) < end - first else part

    def digest(self, references: Iterable[Reference], values: Iterable[Tensor]) -> str:
        """Return a text that two recordings share if they make the same values, and have made the same `values`."""
        places = {key: place for place, key in enumerate(self._storages.sizes)}

        def rename(leaf: Any) -> Any:
            return replace(leaf, storage=places[leaf.storage]) if isinstance(leaf, Reference) else leaf

        found = xxhash.xxh3_128()
        for operation in self._operations:
            found.update(f"{operation.function} {operation.default_dtype}".encode())
            for leaf in operation.leaves:
                found.update(_bytes_of(leaf) if isinstance(leaf, Tensor) else repr(rename(leaf)).encode())
            found.update(b"" if operation.moment is None else operation.moment.digest())
        found.update(repr([rename(reference) for reference in references]).encode())
        for tensor in values:
            found.update(_bytes_of(tensor.detach()))
        return found.hexdigest()

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], *, has_device: bool) -> Any:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        moment = self._stream.now() if is_random else None
        leaves, structure = tree_flatten((args, kwargs))
        recorded = [self._as_leaf(func, leaf) for leaf in leaves]
        if is_sized := has_size_by_values(func, leaves):
            if any(True for _ in list_written(func, args, kwargs)):
                raise UndeferrableError(f"the operator {func} resizes a tensor")
            found = func(*tree_map(self.with_values, args), **tree_map(self.with_values, kwargs))
            result, new = self._storages.make_like(found)
        elif func in FILLS.keys() | _CONSTANT_FILLS and args[0].is_floating_point():
            result, new = args[0], []
        else:
            result, new = self._storages.run(func, args, kwargs)
        results = tree_flatten(result)[0]
        made = [(place, self._refer(results[place])) for place in new]
        spans = join_spans(map(self._refer, list_written(func, args, kwargs)))
        if not made and not spans:
            return result
        if not (has_device or is_random or is_sized or checks_values(func)):
            self._prover.prove(func, args, kwargs, {place: results[place] for place, _ in made})
        if has_device and "dtype" in {argument.name for argument in func._schema.arguments} and made:
            # As it is now: the default dtype may change.
            args_, kwargs_ = tree_unflatten(recorded, structure)
            recorded, structure = tree_flatten((args_, {**kwargs_, "dtype": made[0][1].dtype}))
        spans |= {reference.storage: (0, self._storages.sizes[reference.storage]) for _, reference in made}
        operation = _Operation(func, recorded, structure, made, spans, moment)
        if moment is not None:
            operation = replace(operation, num_words=self._draw(operation, moment))
        for key in operation.written:
            self._writers.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)
        return result

    def _check_values(self, func: Any, args: Any, kwargs: Any) -> None:
        """Run an operation that checks values, on those that it checks, so that it raises what it would raise."""
        are_all_checked = checks_values(func)
        if not are_all_checked and not checks_indices(func, tree_flatten((args, kwargs))[0]):
            return
        written = {id(tensor) for tensor in list_written(func, args, kwargs)}

        def give(leaf: Any) -> Any:
            if are_all_checked or not self._storages.knows(leaf) or is_integer(leaf):
                return self.with_values(leaf)
            shape = leaf.shape if id(leaf) in written else ()
            return torch.zeros(shape, dtype=leaf.dtype, device="cpu").expand(leaf.shape)

        func(*tree_map(give, args), **tree_map(give, kwargs))

    def _draw(self, operation: _Operation, moment: Moment) -> int:
        """Move the generator on as the operation would, and return by how many words, or 0 if that is not known."""
        target = operation.leaves[0] if operation.leaves else None
        if operation.function in FILLS and isinstance(target, Reference) and target.num_elements >= GROUP:
            draw = getattr(torch._C.TensorBase, FILLS[operation.function])  # that of Tensor is watched
            words = cost(draw, target.dtype, target.num_elements % GROUP) if is_contiguous(target) else None
            if words is not None:
                num_words = words[0] * target.num_elements + words[1]
                self._stream.advance(moment, num_words)
                if self._is_generator_held:
                    self._stream.settle()
                return num_words
        storages = {} if operation.function in BLIND else self._replay(join_spans(operation.references))

        def give(leaf: Any) -> Any:
            if not isinstance(leaf, Reference):
                return leaf
            if operation.function in BLIND:
                return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="cpu")
            return leaf.of(storages[leaf.storage])

        args, kwargs = tree_unflatten([give(leaf) for leaf in operation.leaves], operation.structure)
        self._stream.settle()
        operation.function(*args, **kwargs)
        return 0

    def settle(self) -> None:
        """Leave torch's generator in the state in which the construction would."""
        self._stream.settle()

    def _replay(self, wanted: dict[int, tuple[int, int]]) -> dict[int, torch.UntypedStorage]:
        """Return storages with values in some of their bytes, in the memory that the operations for these need."""
        chosen: set[int] = set()
        self._choose(wanted, chosen)
        order = sorted(chosen)
        touched = [self._operations[place].reads | self._operations[place].written for place in order]
        last_use = {key: place for place, keys in enumerate(touched) for key in keys}
        storages: dict[int, torch.UntypedStorage] = {}
        for place, number in enumerate(order):
            operation = self._operations[number]
            for key in operation.reads - storages.keys():  # of which nothing before is of use
                storages[key] = torch.UntypedStorage(self._storages.sizes[key])
            operation.run(storages, self._stream)
            for key in touched[place] - wanted.keys():
                if last_use[key] == place:
                    del storages[key]
        for key in wanted.keys() - storages.keys():  # such as of tensors without elements
            storages[key] = torch.UntypedStorage(self._storages.sizes[key])
        return storages

    def _choose(self, wanted: dict[int, tuple[int, int]], chosen: set[int]) -> None:
        """Add the places of all operations that the values of some bytes of storages depend on."""
        todo = [(key, span, len(self._operations)) for key, span in wanted.items()]
        while todo:
            key, span, end = todo.pop()
            writers = self._writers[key]
            for index in range(bisect_left(writers, end) - 1, -1, -1):
                place = writers[index]
                operation = self._operations[place]
                begins, ends = operation.spans[key]
                if ends <= span[0] or begins >= span[1]:
                    continue
                if place not in chosen:
                    chosen.add(place)
                    for other in operation.references:
                        # What lies in the bytes that are wanted anyway is found by going on.
                        if other.storage != key or other.span[0] < span[0] or other.span[1] > span[1]:
                            todo.append((other.storage, other.span, place))
                if self._overwrites(operation, key, span):
                    break

    def _overwrites(self, operation: _Operation, key: int, span: tuple[int, int]) -> bool:
        """Whether nothing of some bytes of a storage from before an operation is left after it."""
        target = operation.leaves[0] if operation.leaves else None
        is_filled = operation.function in FILLS or operation.function in _CONSTANT_FILLS
        if not is_filled or not isinstance(target, Reference) or target.storage != key or not is_contiguous(target):
            return False
        return target.span[0] <= span[0] and span[1] <= target.span[1]

    def _covers(self, reference: Reference) -> bool:
        num_bytes = reference.num_elements * reference.dtype.itemsize
        return is_contiguous(reference) and num_bytes == self._storages.sizes[reference.storage]

    def _list_pointwise(self, reference: Reference) -> list[_Operation] | None:
        """Return the operations that made a tensor, if each element is made alone and in order; else None."""
        chain: list[_Operation] = []
        for place in reversed(self._writers[reference.storage]):
            operation = self._operations[place]
            target, *others = operation.leaves or [None]
            is_plain = not any(isinstance(one, Reference) or (isinstance(one, Tensor) and one.dim()) for one in others)
            is_whole = isinstance(target, Reference) and target.dtype == reference.dtype and self._covers(target)
            if not is_plain or not is_whole:
                return None
            chain.insert(0, operation)
            if operation.function in _CONSTANT_FILLS:
                return chain
            if operation.function in FILLS:
                is_in_groups = reference.num_elements % GROUP == 0
                return chain if is_in_groups and fills_in_order(operation.function, reference.dtype) else None
            if operation.function not in _POINTWISE:
                return None
        return None

    def _writes_outside(self, func: Any, args: Any, kwargs: Any) -> bool:
        are_known = {self._storages.knows(tensor) for tensor in list_written(func, args, kwargs)}
        if len(are_known) > 1:
            raise UndeferrableError(f"the operator {func} writes at once to the model's tensors and to others")
        return False in are_known

    def _as_leaf(self, func: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if (reference := self.refer(leaf)) is not None:
            return reference
        if leaf.is_meta and func is torch.ops.aten.empty_like.default:
            return leaf  # which has a shape, and that is all that is asked for
        if leaf.device.type != "cpu":
            raise UndeferrableError(f"it uses a tensor on the device {leaf.device}")
        self._constant_bytes += leaf.nbytes
        if self._constant_bytes > _MAX_CONSTANT_BYTES:
            raise UndeferrableError("it copies values from elsewhere, such as trained weights")
        return leaf.detach().clone()


def _bytes_of(tensor: Tensor) -> bytes:
    if tensor.is_meta:
        return repr((tensor.shape, tensor.stride(), tensor.dtype)).encode()
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
