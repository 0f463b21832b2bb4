"""Torch's `nn.MultiheadAttention` with some of the heads on each rank of the tensor axis."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import SettingsError
from paceline.parallel.activations import Activations


def check_heads(name: str, module: nn.Module) -> None:
    """Raise `SettingsError` if a module is no attention of torch, or of a kind that cannot be split by heads."""
    if not isinstance(module, nn.MultiheadAttention):
        raise SettingsError(
            f"a module of style 'heads' must be an nn.MultiheadAttention, but {name} is a {type(module).__name__}; "
            "name the linear maps inside it 'columns' and 'rows'"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise SettingsError(
            f"an attention of style 'heads' must have no add_bias_kv and no add_zero_attn, but {name} has; build it "
            "without, or leave it out of the tensor plan"
        )


def split_heads(module: nn.Module, activations: Activations) -> None:
    """Let an attention, whose parameters show this rank's part of them, attend with this rank's heads."""
    kind: type[nn.Module] = type(module)
    forward = _attend_with(activations)
    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})


def _attend_with(activations: Activations) -> Any:
    def forward(
        self: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention of all heads, and its weights if they are needed, as torch's own forward does."""
        given = [query, key, value]
        moved = {name: activations.gather(one) for name, one in {id(one): one for one in given}.items()}
        if query.dim() == 2:
            moved = {name: one.unsqueeze(0) for name, one in moved.items()}
        elif not self.batch_first:
            moved = {name: one.transpose(0, 1) for name, one in moved.items()}
        num_heads = self.num_heads // activations.device_mesh.size()
        q_BHTD, k_BHSD, v_BHSD = (
            F.linear(moved[id(one)], weight, bias).unflatten(-1, (num_heads, self.head_dim)).transpose(1, 2)
            for one, weight, bias in zip(given, *_parts(self), strict=True)
        )
        mask = _mask(self, q_BHTD, key_padding_mask, attn_mask, activations)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q_BHTD @ k_BHSD.transpose(-2, -1) * self.head_dim**-0.5
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            heads_BHTD = weights @ v_BHSD
        else:
            heads_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, mask, dropout)
        output: Tensor = self.out_proj(heads_BHTD.transpose(1, 2).flatten(-2))
        if weights is not None:
            weights = activations.join_features(weights.movedim(1, -1)).movedim(-1, 1)
            weights = weights.mean(1) if average_attn_weights else weights
        if query.dim() == 2:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    return forward


def _parts(module: nn.MultiheadAttention) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return this rank's weights and biases of queries, keys and values."""
    if module.in_proj_weight is not None:
        weights = list(module.in_proj_weight.chunk(3))
    else:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    return weights, [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.chunk(3))


def _mask(
    module: nn.MultiheadAttention,
    query_BHTD: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    activations: Activations,
) -> Tensor | None:
    """Return what is added to the scores of this rank's heads, with dims for samples and heads."""
    mask = None
    if attn_mask is not None:
        mask = _additive(attn_mask, query_BHTD)
        if mask.dim() == 3:  # one for each sample and head
            own = mask.unflatten(0, (-1, module.num_heads)).chunk(activations.device_mesh.size(), dim=1)
            mask = own[activations.place]
        else:
            mask = mask[None, None]
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, query_BHTD)
        padding = padding[None] if padding.dim() == 1 else padding
        mask = padding[:, None, None] if mask is None else mask + padding[:, None, None]
    return mask


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, float("-inf"))
