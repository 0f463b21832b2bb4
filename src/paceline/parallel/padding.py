"""Which tokens a model's attention hides, such as padding, and samples that hide some."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.data.batch import list_tensors, map_tensors
from paceline.parallel.split_forward import Context


class NotingContext:
    """Access to split sequences that notes which of this rank's tokens any attention sees.

    Args:
        context: Access that computes attention.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.seen_BT: list[Tensor] = []

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the position in the sequence of each token of this rank."""
        return self._context.positions(num_tokens, device)

    def attend(
        self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, *, is_causal: bool,
        keep_BT: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the attention of this rank's tokens to those of all ranks."""
        if keep_BT is not None:
            self.seen_BT.append(keep_BT)
        return self._context.attend(
            query_BHTD, key_BHTD, value_BHTD, is_causal=is_causal, keep_BT=keep_BT, dropout_p=dropout_p, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip

    def find_seen(self, shape: torch.Size) -> Tensor:
        """Return which tokens, of that shape, any attention has seen; all if one had others."""
        if not self.seen_BT or any(one.shape != shape for one in self.seen_BT):
            return torch.ones(shape, dtype=torch.bool)
        return torch.stack(self.seen_BT).any(0)


def hide_tokens(sample: Any) -> Iterator[tuple[Any, str]]:
    """Yield copies of a sample whose masks hide tokens at the front and at the back, with words for a refusal.

    Masks are tensors of integers or bools of shape (batch, tokens) that are 0 or 1; in a mapping those with "mask" in
    their names. What most tokens have becomes the other at these, so that masks may be of what counts or of padding.
    Without a mask there are no copies.
    """
    for where in ("front", "back"):
        found: list[int] = []

        def hide(tensor: Tensor, where: str = where, found: list[int] = found) -> Tensor:
            is_mask = tensor.dim() == 2 and not tensor.is_floating_point() and tensor.numel() > 0
            if not is_mask or bool((tensor != 0).logical_and(tensor != 1).any()):
                return tensor
            found.append(1)
            width = tensor.shape[1]
            num_hidden = max(1, 3 * width // 8) if where == "front" else max(1, width // 8)
            other = tensor.clone()
            edge = other[:, :num_hidden] if where == "front" else other[:, width - num_hidden :]
            edge.fill_(0 if 2 * int(tensor.sum()) >= tensor.numel() else 1)
            return other

        if isinstance(sample, Mapping):
            other: Any = {key: map_tensors(hide, one) if "mask" in key else one for key, one in sample.items()}
        else:
            other = map_tensors(hide, sample)
        if found and len(list_tensors(sample)) > 1:
            pad = "pad at the back, or " if where == "front" else ""
            yield other, f", where a mask hides tokens at the {where} ({pad}leave masks out if no batch has padding)"
