"""Long sequences that the ranks of the context axis share."""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from paceline.data.batch import LABELS, NEXT_LABELS, describe, list_tensors, map_tensors
from paceline.errors import SettingsError
from paceline.parallel.context_check import ContextCheck
from paceline.parallel.mesh import Mesh
from paceline.parallel.second_order import differentiated_once
from paceline.parallel.split_forward import find_forwards, split_forwards, split_forwards_in
from paceline.parallel.start import broadcast_sample
from paceline.parallel.trial import perturbed, undisturbed


class FullContext:
    """Access of a model to its sequences if this rank has every token."""

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the position in the sequence of each token of this rank, of shape (num_tokens,)."""
        return torch.arange(num_tokens, device=device)

    def attend(
        self,
        query_BHTD: Tensor,
        key_BHTD: Tensor,
        value_BHTD: Tensor,
        *,
        is_causal: bool,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of this rank's tokens to all tokens; if `is_causal`, to themselves and those before.

        With numbers of documents, it is to tokens of the same document only.
        """
        if documents_BT is not None:
            mask_B1TT = (documents_BT[:, :, None] == documents_BT[:, None, :])[:, None]
            mask_B1TT = mask_B1TT.tril() if is_causal else mask_B1TT
            return F.scaled_dot_product_attention(query_BHTD, key_BHTD, value_BHTD, attn_mask=mask_B1TT)
        return F.scaled_dot_product_attention(query_BHTD, key_BHTD, value_BHTD, is_causal=is_causal)


FULL_CONTEXT = FullContext()


class ContextParallelModule(nn.Module):
    """A module that uses positions or attention only through `context`, so that its sequences can be split."""

    context: FullContext = FULL_CONTEXT


class SplitContext(FullContext):
    """Access of a model to sequences of which this rank has a part; keys and values of the others are gathered.

    As in the training of Llama 3 (Dubey et al. 2024, section 3.3.2): a sequence is split into 2n chunks, and rank i of
    n has chunks i and 2n - 1 - i, so that causal attention takes all ranks the same work. It is exact, and needs no
    sums of softmaxes as a ring (Liu et al. 2023) does, but memory for all keys and values of a layer. On the wire each
    rank sends its keys and values n - 1 times in forward, and as much gradient in backward.

    Args:
        device_mesh: Ranks of the axis.
        drops: Whether attention drops weights if it is asked to.
    """

    def __init__(self, device_mesh: DeviceMesh, *, drops: bool = True) -> None:
        self._device_mesh = device_mesh
        self._drops = drops
        self._size = device_mesh.size()
        self._place = device_mesh.get_local_rank()

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the position in the sequence of each token of this rank."""
        chunk = torch.arange(num_tokens // 2, device=device)
        return torch.cat([place * len(chunk) + chunk for place in self._chunks(self._place)])

    def attend(
        self,
        query_BHTD: Tensor,
        key_BHTD: Tensor,
        value_BHTD: Tensor,
        *,
        is_causal: bool,
        documents_BT: Tensor | None = None,
        keep_BT: Tensor | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the attention of each token of this rank to all tokens of all ranks.

        Args:
            query_BHTD: Queries of this rank's tokens.
            key_BHTD: Keys of this rank's tokens.
            value_BHTD: Values of this rank's tokens.
            is_causal: Whether a token sees none after it.
            documents_BT: Number of the document of each token of this rank, which sees no other; None for one document.
            keep_BT: False for this rank's tokens that no other sees, such as padding. All ranks give it, or none does.
            dropout_p: Probability of dropping a weight.
            scale: Factor of the scores; by default the inverse root of D.
            enable_gqa: Whether several queries' heads share those of keys and values.
        """
        kept_B11T = None
        if keep_BT is not None:
            # Models may repeat keys where there is a mask, which is left out where a rank's part of it is of ones.
            num_heads = key_BHTD.shape[1]
            signed = torch.where(keep_BT, num_heads, -num_heads).to(torch.float32)
            gathered = self._gather(signed[:, None, :, None])[..., 0]
            low, high = torch.stack(gathered.aminmax()).tolist()
            if (repeats := int(max(-low, high)) // num_heads) > 1:
                key_BHTD, value_BHTD = (one.repeat_interleave(repeats, 1) for one in (key_BHTD, value_BHTD))
            kept_B11T = None if low > 0 else (gathered > 0)[:, :, None]
        widths = [key_BHTD.shape[-1], value_BHTD.shape[-1]]  # latent attention has different ones
        joined_BHTD = self._gather(torch.cat([key_BHTD, value_BHTD], dim=-1))
        keys_BHTD, values_BHTD = joined_BHTD.split(widths, dim=-1)
        whole_BT = None
        if documents_BT is not None:  # numbers of a row's documents are small
            whole_BT = self._gather(documents_BT[:, None, :, None].float())[:, 0, :, 0]
        dropout_p = dropout_p if self._drops else 0.0
        attend = partial(F.scaled_dot_product_attention, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
        if not is_causal:
            return attend(query_BHTD, keys_BHTD, values_BHTD, attn_mask=_join(kept_B11T, documents_BT, whole_BT))
        queries = query_BHTD.chunk(2, dim=-2)
        documents = (None, None) if documents_BT is None else documents_BT.chunk(2, dim=-1)
        return torch.cat(
            [
                _attend_to_prefix(
                    query, keys_BHTD, values_BHTD, chunk * query.shape[-2], _join(kept_B11T, mine, whole_BT), attend
                )
                for query, mine, chunk in zip(queries, documents, self._chunks(self._place), strict=True)
            ],
            dim=-2,
        )

    def _chunks(self, place: int) -> tuple[int, int]:
        return place, 2 * self._size - 1 - place

    def _gather(self, part_BHTD: Tensor) -> Tensor:
        """Return keys and values of the whole sequence, in its order; their gradients are summed over the ranks."""
        part = DTensor.from_local(part_BHTD[None], self._device_mesh, [Shard(0)], run_check=False)
        parts = part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        parts = differentiated_once(parts, "context")
        chunks = parts.movedim(0, 2).unflatten(3, (2, -1)).flatten(2, 3)
        lies_at = {chunk: i for i, chunk in enumerate(c for rank in range(self._size) for c in self._chunks(rank))}
        order = torch.tensor([lies_at[chunk] for chunk in range(2 * self._size)], device=chunks.device)
        whole_BHTD: Tensor = chunks.index_select(2, order).flatten(2, 3)
        return whole_BHTD


def _join(kept_B11T: Tensor | None, mine_BT: Tensor | None, whole_BT: Tensor | None) -> Tensor | None:
    """Return which tokens each of this rank's may see: those that are kept, of its own document; None for all."""
    if mine_BT is None or whole_BT is None:
        return kept_B11T
    same_B1TT = (mine_BT[:, :, None] == whole_BT[:, None, :])[:, None]
    return same_B1TT if kept_B11T is None else same_B1TT & kept_B11T


def _attend_to_prefix(
    query: Tensor, keys: Tensor, values: Tensor, begin: int, kept: Tensor | None, attend: Callable[..., Tensor]
) -> Tensor:
    """Return the attention of queries at positions `begin` and on to themselves and all positions before."""
    num_queries = query.shape[-2]
    end = begin + num_queries
    keys, values = keys[..., :end, :], values[..., :end, :]
    if begin == 0 and kept is None:
        return attend(query, keys, values, is_causal=True)
    mask = torch.ones(num_queries, end, dtype=torch.bool, device=query.device).tril(begin)
    if kept is None:
        return attend(query, keys, values, attn_mask=mask)
    mask = mask & kept[..., :end]
    is_blind = ~mask.any(-1, keepdim=True)
    return attend(query, keys, values, attn_mask=mask | is_blind).masked_fill(is_blind, 0)  # zero as torch's


def split_attention(module: nn.Module, mesh: Mesh, sample: Any = None) -> None:
    """Make a module, in place, run on batches of which each context rank has a part (`split_sequences`).

    With one rank along the axis nothing changes. A model without a `ContextParallelModule` is run once on the `sample`
    to find what looks at other tokens, which then goes through a context too, and compared with the whole model.

    Raises:
        SettingsError: A module looks at other tokens in another way.
    """
    if mesh.size("context") == 1:
        return
    splits_forwards = is_foreign(module) and sample is not None
    if not splits_forwards:
        check_attention(module, mesh.size("context"))
    context = SplitContext(mesh.device_mesh["context"])
    if splits_forwards:
        sample = broadcast_sample(sample, mesh.world)
        with undisturbed(module), perturbed(module):
            split_forwards(module, sample, mesh.size("context"))
            found = ContextCheck(
                module, mesh, SplitContext(mesh.device_mesh["context"], drops=False), partial(split_batch, mesh=mesh)
            ).compare(sample)
        for forward in find_forwards(module):
            forward.shared.mask_check = found
    for part in _list_contextual(module):
        part.context = context
    for forward in find_forwards(module):
        forward.context = context


def is_foreign(module: nn.Module) -> bool:
    """Return whether no module is made to have a part of its sequences."""
    return not _list_contextual(module)


def check_attention(module: nn.Module, size: int) -> None:
    """Raise `SettingsError` if `module` computes attention other than through `ContextParallelModule.context`."""
    parts = _list_contextual(module)
    own = [name for name, part in module.named_modules() if isinstance(part, nn.MultiheadAttention | nn.RNNBase)]
    if own or not parts:
        what = f"{own[0]} does not" if own else f"no module of the {type(module).__name__} does"
        raise SettingsError(
            f"a module that looks at other tokens must use paceline.parallel.context.ContextParallelModule for "
            f"context({size}), but {what}; derive it from that and call self.context.attend, or set "
            "Layout(context=1) (--layout.context 1)"
        )


@contextmanager
def full_sequences(module: nn.Module) -> Iterator[None]:
    """While active, a module takes whole sequences, the same on every rank: for generation, or short texts."""
    contexts = [(part, part.context) for part in _list_contextual(module)]
    for part, _ in contexts:
        part.context = FULL_CONTEXT
    try:
        with split_forwards_in(module, None):
            yield
    finally:
        for part, context in contexts:
            part.context = context


def split_sequences(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's tokens of a batch (dim 1): chunks i and 2n - 1 - i of 2n.

    Inputs and targets are split the same way. A loss over them, times their number, is this rank's term of the total.

    Raises:
        SettingsError: The sequences cannot be split evenly.
    """
    size, place = mesh.size("context"), mesh.coordinate("context")
    if size == 1:
        return tensor
    if tensor.dim() < 2:
        raise SettingsError(
            f"each tensor of a batch for context({size}) must have a token dim after the batch dim, but got the shape "
            f"{tuple(tensor.shape)}; set Layout(context=1) (--layout.context 1)"
        )
    check_length(tensor.shape[1], context=size)
    chunks = tensor.chunk(2 * size, dim=1)
    return torch.cat([chunks[place], chunks[2 * size - 1 - place]], dim=1)


def split_batch(data: Any, mesh: Mesh) -> Any:
    """Return the tokens of each tensor of a batch that are this rank's: see `split_sequences`.

    A mapping with labels gets those of the next tokens too (`NEXT_LABELS`).

    Raises:
        SettingsError: Tensors are of other lengths, so that the dim after the batch dim is not of tokens in all.
    """
    if len({tensor.shape[1:2] for tensor in list_tensors(data)}) > 1:
        raise SettingsError(
            f"each tensor of a batch for context({mesh.size('context')}) must have as many tokens in the dim after the "
            f"batch dim, but got {describe(data)}; give what is no sequence another way, or set "
            "Layout(context=1) (--layout.context 1)"
        )
    if isinstance(data, MutableMapping) and mesh.size("context") > 1:
        data = copy.copy(data)
        for labels in [data[key] for key in LABELS if isinstance(data.get(key), Tensor) and data[key].dim() > 1][:1]:
            data[NEXT_LABELS] = F.pad(labels[:, 1:], (0, 1), value=-100)  # the next of a part's last token is elsewhere
    return map_tensors(lambda tensor: split_sequences(tensor, mesh), data)


def check_length(num_tokens: int, *, context: int, tensor: int = 1) -> None:
    """Raise `SettingsError` if sequences of `num_tokens` cannot be split evenly.

    Args:
        num_tokens: Number of tokens of a whole sequence.
        context: Number of ranks along the context axis.
        tensor: Number of ranks along the tensor axis if they split tokens too (`TensorSplit.cuts_tokens`), else 1.
    """
    chunks = 2 * context if context > 1 else 1
    step = context * tensor
    while step % chunks:
        step += context * tensor
    if num_tokens % step:
        axes = " and ".join(f"{axis}({size})" for axis, size in (("context", context), ("tensor", tensor)) if size > 1)
        below = num_tokens // step * step
        choice = f"{below} or {below + step}" if below else str(step)
        raise SettingsError(
            f"a sequence for {axes} must be a multiple of {step} tokens, but got {num_tokens} = {step} * "
            f"{num_tokens // step} + {num_tokens % step}; choose {choice}"
        )


def _list_contextual(module: nn.Module) -> list[ContextParallelModule]:
    return [part for part in module.modules() if isinstance(part, ContextParallelModule)]
