"""Models whose attention is torch's own, run on a part of each sequence: found on a sample, replaced, and compared."""

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.data.batch import NEXT_LABELS, call, list_tensors, map_tensors
from paceline.errors import SettingsError
from paceline.parallel.split_inputs import SplitState, name_inputs
from paceline.parallel.trial import restored

_ELEMENTWISE = {"add", "sub", "mul", "div", "true_divide", "rsub", "addcmul", "lerp", "where"}
"""Functions of torch that take numbers of the same place, whose names as operators have a mark before or after."""
_MIN_BIAS = -1e4
"""Number below which what is added to an attention score takes a pair out."""
CONTEXT_ADVICE = (
    "derive it from paceline.parallel.ContextParallelModule and call self.context.attend and self.context.positions, "
    "or set Layout(context=1) (--layout.context 1)"
)
"""Advice for a model that does not run on parts of its sequences by itself."""


class Context(Protocol):
    """Access to the tokens of other ranks: `paceline.parallel.context.FullContext`, or one of split sequences."""

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the position in the sequence of each token of this rank."""
        ...

    def attend(
        self,
        query_BHTD: Tensor,
        key_BHTD: Tensor,
        value_BHTD: Tensor,
        *,
        is_causal: bool,
        keep_BT: Tensor | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the attention of this rank's tokens to those of all ranks."""
        ...


@dataclass
class Uses:
    """How a module's own forward uses its sequence, as seen on a sample."""

    kinds: set[bool] = field(default_factory=set)
    """Whether its attention is causal."""
    num_positions: int = 0
    """Number of times that it counts tokens, or takes as many entries of a table."""


class _Mode(TorchFunctionMode):
    """Mode in which attention goes to `attend`, and whatever is made for as many tokens as there are to `place`."""

    def __init__(self, module: nn.Module, num_tokens: int | None) -> None:
        super().__init__()
        self._module, self.num_tokens = module, num_tokens

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return an attention; arguments are those of torch's `scaled_dot_product_attention`."""
        raise NotImplementedError

    def place(self, made: Tensor, table: Tensor, dim: int) -> Tensor:
        """Return what takes the place of `made`, the first entries of `table` along `dim`."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        if (getattr(_here, "mode", None) or self) is not self:  # that of a module inside
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # Torch's own function with another attention in it; it uses one only if no weights are asked for.
            attention = FunctionType(func.__code__, {**func.__globals__, "scaled_dot_product_attention": self.attend})
            attention.__defaults__, attention.__kwdefaults__ = func.__defaults__, func.__kwdefaults__
            with torch._C.DisableTorchFunction():  # or a mode around this one would run the original
                return attention(*args, **{**kwargs, "need_weights": False})
        if self.num_tokens and func.__name__.strip("_").removeprefix("i").removeprefix("r") in _ELEMENTWISE:
            args = self.pick(args)
        made = func(*args, **kwargs)
        if self.num_tokens and func is torch.arange and args in ((self.num_tokens,), (0, self.num_tokens)):
            return self.place(made, made, 0)
        if self.num_tokens and func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for dim, one in enumerate(index):
                is_first = isinstance(one, slice) and one.stop == self.num_tokens and not one.start
                if is_first and one.step in (None, 1) and self._is_table(args[0]):
                    return self.place(
                        made, args[0][tuple(slice(None) if i == dim else x for i, x in enumerate(index))], dim
                    )
        return made

    def pick(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a function of numbers of the same place, as many of each as there are tokens."""
        return args

    def _is_table(self, tensor: Tensor) -> bool:
        whole = tensor if tensor._base is None else tensor._base
        return isinstance(whole, nn.Parameter) or any(whole is buffer for buffer in self._module.buffers())


class _Probe(_Mode):
    """Mode that notes how the modules of a model use their sequences."""

    def __init__(self, module: nn.Module, num_tokens: int | None) -> None:
        super().__init__(module, num_tokens)
        self.uses: dict[str, Uses] = {}
        self.inside: list[str] = [""]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return torch's attention, and note whether it is causal."""
        if attn_mask is not None:
            above = torch.ones(attn_mask.shape[-2:], dtype=torch.bool, device=attn_mask.device).triu(1)
            is_causal = bool(above.any()) and not bool((_find_allowed(attn_mask) & above).any())
            _find_kept(attn_mask[:, None] if query.dim() == attn_mask.dim() == 3 else attn_mask, is_causal)
        self._here.kinds.add(is_causal)
        is_causal = is_causal and attn_mask is None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def place(self, made: Tensor, table: Tensor, dim: int) -> Tensor:
        """Return `made`."""
        self._here.num_positions += 1
        return made

    @property
    def _here(self) -> Uses:
        return self.uses.setdefault(self.inside[-1], Uses())


class _Split(_Mode):
    """Mode in which a module's forward has a part of each sequence."""

    def __init__(self, forward: "SplitForward", num_tokens: int | None) -> None:
        super().__init__(forward.module, num_tokens)
        self._forward = forward
        self.num_positions = 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the attention of this rank's tokens to those of all ranks."""
        assert self._forward.context is not None
        if query.dim() == 3:  # one head without a dim
            query, key, value = query[:, None], key[:, None], value[:, None]
            attn_mask = attn_mask[:, None] if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
            return self.attend(query, key, value, attn_mask, dropout_p, is_causal, scale)[:, 0]
        if attn_mask is not None:
            (is_causal,) = self._forward.uses.kinds
        keep_BT = _find_kept(attn_mask, is_causal) if attn_mask is not None else query.new_ones(1, key.shape[-2]).bool()
        with torch._C.DisableTorchFunction():  # for modes of modules around this one
            return self._forward.context.attend(
                query,
                key,
                value,
                is_causal=is_causal,
                keep_BT=keep_BT.expand(len(query), -1),
                dropout_p=dropout_p,
                scale=scale,
                enable_gqa=enable_gqa,
            )

    def place(self, made: Tensor, table: Tensor, dim: int) -> Tensor:
        """Return the positions of this rank's tokens, or the entries at these."""
        assert self._forward.context is not None
        self.num_positions += 1
        positions = self._forward.context.positions(made.shape[dim], made.device)
        return positions.to(made.dtype) if table is made else table.index_select(dim, positions)

    def pick(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with the entries at this rank's tokens of tables that hold those of all tokens.

        Such a table does not fit what else is given, which holds this rank's tokens only.
        """
        tensors = [one for one in args if isinstance(one, Tensor)]
        return tuple(self._pick(one, tensors) if isinstance(one, Tensor) else one for one in args)

    def _pick(self, table: Tensor, others: list[Tensor]) -> Tensor:
        assert self._forward.context is not None
        assert self.num_tokens is not None
        dims = [
            dim - table.dim()
            for dim, length in enumerate(table.shape)
            if length == self._forward.num_all_tokens
            and any(_reach(one, dim - table.dim(), self.num_tokens) for one in others)
        ]
        if len(dims) != 1 or not self._is_table(table):
            return table
        return table.index_select(dims[0], self._forward.context.positions(self.num_tokens, table.device))


def _reach(tensor: Tensor, dim: int, length: int) -> bool:
    return tensor.dim() >= -dim and tensor.shape[dim] == length


class SplitForward:
    """Forward of a module whose attention and positions go through a context, in place of its own.

    Args:
        module: Module.
        name: Name of the module in the model; empty for the model, which gets its positions as an argument if it
            takes them.
        uses: Use of sequences by the module.
        positions: Names of the arguments of a model that say where its tokens are.
    """

    def __init__(
        self, module: nn.Module, name: str, uses: Uses, positions: tuple[str, ...], shared: SplitState
    ) -> None:
        self.context: Context | None = None
        """Context of split sequences; None while there are whole ones."""
        self.uses = uses
        self._name = name
        self.positions = positions
        self.shared = shared
        self.module, self._original = module, module.forward
        module.forward = self

    @property
    def num_all_tokens(self) -> int:
        """Number of tokens of each sequence on all ranks, in the present forward."""
        return (self.shared.num_tokens or 0) * self.shared.size

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self.context is None:
            return self._original(*args, **kwargs)
        if not self._name:
            tokens = next(tensor for tensor in list_tensors((args, kwargs)) if tensor.dim() > 1)
            self.shared.note_tokens(tokens.shape[1])
            given = name_inputs(self._original, args, kwargs)
            kwargs = self._add_positions(tokens, args, kwargs)
            self.shared.check_inputs(given, self.positions)
        before = getattr(_here, "mode", None)
        with _Split(self, None if self.positions else self.shared.num_tokens) as mode:
            _here.mode = mode
            try:
                output = self._original(*args, **kwargs)
            finally:
                _here.mode = before
        if mode.num_positions != self.uses.num_positions:
            raise SettingsError(
                f"a module must use the positions of its tokens as it did on the sample, but "
                f"{self._name or 'the model'} did {mode.num_positions} times and not {self.uses.num_positions}; "
                f"{CONTEXT_ADVICE}"
            )
        return output

    def _add_positions(self, tokens: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if found := {"labels", NEXT_LABELS} & {name for name, value in kwargs.items() if value is not None}:
            raise SettingsError(
                f"a model must not compute its own loss for a context axis, whose ranks have parts of the labels, but "
                f"got {sorted(found)[0]}; take loss next_token (--loss next_token) or masked_lm, or compute the loss "
                "from output.logits and batch.targets"
            )
        assert self.context is not None
        return kwargs | add_positions(self.positions, self.context, tokens, kwargs)


_here = threading.local()


def add_positions(
    names: tuple[str, ...], context: Context | None, tokens: Tensor, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a model that say where its tokens are, those that are not given.

    With positions alone some models of transformers take a jump between them for the start of another text: the mask,
    of ones, says that it is not.

    Raises:
        SettingsError: There are such texts, without a mask.
    """
    length, device = tokens.shape[1], tokens.device
    positions = torch.arange(length, device=device) if context is None else context.positions(length, device)
    own = given.get("position_ids")
    if own is not None and given.get("attention_mask") is None and not bool((own == positions).all()):
        raise SettingsError(
            "position_ids must count all tokens of a sequence for a context axis, but got others, as of several texts "
            "in one sequence, whose attention is not split; leave them out, give each text a sample of its own, or set "
            "Layout(context=1) (--layout.context 1)"
        )
    made = {
        "position_ids": positions[None],
        "attention_mask": torch.ones(tokens.shape[:2], dtype=torch.int64, device=device),
    }
    return {name: made[name] for name in names if given.get(name) is None}


def find_forwards(module: nn.Module) -> list[SplitForward]:
    """Return the forwards that `split_forwards` has replaced."""
    forwards = [part.__dict__.get("forward") for part in module.modules()]
    originals = [getattr(forward, "_torchdynamo_orig_callable", forward) for forward in forwards]
    return [forward for forward in originals if isinstance(forward, SplitForward)]


@contextmanager
def split_forwards_in(module: nn.Module, context: Context | None) -> Iterator[None]:
    """While active, the forwards that `split_forwards` has replaced have another context."""
    forwards = [(forward, forward.context) for forward in find_forwards(module)]
    for forward, _ in forwards:
        forward.context = context
    try:
        yield
    finally:
        for forward, before in forwards:
            forward.context = before


def split_forwards(module: nn.Module, sample: Any, size: int) -> None:
    """Replace the forwards of the modules that look at other tokens, or count them; found by a run on a sample.

    They do as before until they get a context. Sequences may be as long as the sample's.

    Args:
        module: Model.
        sample: Inputs of the model, with whole sequences.
        size: Number of ranks that get parts of them.

    Raises:
        SettingsError: No module calls torch's attention.
    """
    names = _find_position_names(module, sample)
    by_place = sample if isinstance(sample, tuple | list) else (sample,)
    inputs = set(sample if isinstance(sample, Mapping) else name_inputs(module.forward, by_place, {}))
    tokens = next((tensor for tensor in list_tensors(sample) if tensor.dim() > 1), None)
    if tokens is None:
        raise SettingsError("sample must hold sequences for a context axis, but its tensors have no second dim")
    if any(isinstance(part, nn.MultiheadAttention) for part in module.modules()):
        torch.backends.mha.set_fastpath_enabled(False)  # it has its own attention, in evaluation only
    if names:
        sample = {**sample, **add_positions(names, None, tokens, sample)}
    probe = _Probe(module, None if names else tokens.shape[1])
    with restored(module), torch.no_grad(), names_of_calls(module, probe.inside), probe:
        call(module, map_tensors(torch.clone, sample))
    if not any(uses.kinds for uses in probe.uses.values()):
        raise SettingsError(
            f"a module that looks at other tokens must call F.scaled_dot_product_attention for a context axis, but no "
            f'module of the {type(module).__name__} does; call that (attn_implementation="sdpa" of transformers), '
            f"or {CONTEXT_ADVICE}"
        )
    mixed = [name for name, uses in probe.uses.items() if len(uses.kinds) > 1]
    if mixed:
        raise SettingsError(
            f"a module's attention must be always causal or never for a context axis, but {mixed[0]} has both; "
            f"{CONTEXT_ADVICE}"
        )
    shared = SplitState(tokens.shape[1] // size, size, inputs)
    for name in dict.fromkeys(["", *probe.uses]):
        SplitForward(module.get_submodule(name), name, probe.uses.get(name, Uses()), names, shared)


def check_masks(module: nn.Module, sample: Any) -> None:
    """Raise `SettingsError` if a mask of attention of a whole sample hides other than whole tokens."""
    with restored(module), torch.no_grad(), _Probe(module, None):
        call(module, map_tensors(torch.clone, sample))


def _find_position_names(module: nn.Module, sample: Any) -> tuple[str, ...]:
    parameters = inspect.signature(module.forward).parameters
    if "position_ids" not in parameters or not isinstance(sample, Mapping):
        return ()
    return tuple(name for name in ("position_ids", "attention_mask") if name in parameters)


@contextmanager
def names_of_calls(module: nn.Module, inside: list[str]) -> Iterator[None]:
    """Keep the names of the modules that are being called in `inside`, the innermost last."""
    handles = []
    for name, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(lambda *_, name=name: inside.append(name)))
        handles.append(part.register_forward_hook(lambda *_: [inside.pop(), None][1]))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _find_allowed(mask: Tensor) -> Tensor:
    """Return which pairs of tokens a mask of attention lets through."""
    if mask.dtype == torch.bool:
        return mask
    allowed = mask > _MIN_BIAS
    if mask.requires_grad or (mask.where(allowed, 0) != 0).any():  # one that learns may be zero at first
        raise SettingsError(
            f"an attention mask must be yes or no for each pair of tokens for a context axis, but it adds numbers; "
            f"{CONTEXT_ADVICE}"
        )
    return allowed


def _find_kept(mask: Tensor, is_causal: bool) -> Tensor:
    """Return which of this rank's tokens others may look at, of shape (1 or samples, tokens)."""
    allowed = _find_allowed(mask)
    if is_causal:
        kept = allowed.diagonal(dim1=-2, dim2=-1)
        is_fit = (allowed == (kept[..., None, :] & torch.ones_like(allowed).tril())) | ~kept[..., :, None]
    else:
        kept = allowed.any(-2)
        is_fit = allowed == kept[..., None, :]
    kept = kept.reshape(-1, 1, kept.shape[-1]) if kept.dim() == 1 else kept.flatten(1, -2)
    if not is_fit.all() or not (kept == kept[:, :1]).all():
        raise SettingsError(
            "an attention mask must hide whole tokens, or those after each, for a context axis, but got another of the "
            f"shape {tuple(mask.shape)}; {CONTEXT_ADVICE}"
        )
    return kept[:, 0]
