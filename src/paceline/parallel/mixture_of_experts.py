"""A layer of which each token uses a few experts: a router, its limits and its balance, and the experts.

Shapes: B samples, T tokens of a sample, N tokens, W width, H hidden dims, E experts, K experts of a token.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paceline.errors import SettingsError

_is_uneven = False


class Experts(nn.Module):
    """Gated MLPs (SwiGLU, Shazeer 2020) side by side, each for its own tokens.

    A layout with an expert axis divides them among ranks; see `register_experts` for other modules.

    Args:
        width: Dims of a token's vector.
        num_experts: Number of experts.
        hidden: Hidden dims of each expert.
    """

    def __init__(self, width: int, num_experts: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.expand = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.project = nn.Parameter(torch.empty(num_experts, width, hidden))
        for weight in self.parameters():
            bound = weight.shape[-1] ** -0.5  # as nn.Linear does
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x_NW: Tensor, index_NK: Tensor, weight_NK: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Return the sum of each token's experts, each times its weight.

        Args:
            x_NW: Tokens.
            index_NK: Experts of each token; `num_experts` stands for none.
            weight_NK: Weights of these experts.
            counts: Number of times `index_NK` names each expert, if the host knows; by default it waits for them.
        """
        counts = _read_counts(index_NK, self.num_experts) if counts is None else counts
        order = index_NK.flatten().argsort(stable=True)[: sum(counts)]
        token = order // index_NK.shape[1]
        # One after the other: experts have different numbers of tokens.
        weights = zip(self.gate.unbind(), self.expand.unbind(), self.project.unbind(), strict=True)
        mapped = [
            F.linear(F.silu(F.linear(x, gate)) * F.linear(x, expand), project)
            for x, (gate, expand, project) in zip(x_NW[token].split([*counts]), weights, strict=True)
        ]
        weighted = torch.cat(mapped) * weight_NK.flatten()[order, None]
        return torch.zeros_like(x_NW).index_add(0, token, weighted.to(x_NW.dtype))


class MixtureOfExperts(nn.Module):
    """A layer of which each token uses a few experts (Shazeer 2017), in the place of a Transformer's MLP.

    Add `balance_loss` of the model to the training loss; a run does it by itself.

    Capacity and balance are those of each sample by itself, as of the groups of GShard (Lepikhin 2020), so that neither
    depends on batch, micro-batches or layout: with the same samples, one process trains the same. Within a sample
    earlier tokens go first, so that none depends on later ones. A token over capacity keeps its other experts, and what
    goes around the layer. In evaluation there is no capacity.

    Args:
        width: Dims of a token's vector.
        num_experts: Number of experts.
        hidden: Hidden dims of each expert; by default 4 times `width`.
        top_k: Number of experts of each token. Their weights are the router's probabilities, which add up to 1 if there
            are several.
        capacity_factor: Most tokens of a sample that an expert takes, as a multiple of its even share; None for all.
        balance: Factor of the load-balancing loss.
        experts: Experts of another kind: a module as `register_experts` describes it; by default `Experts`.

    Raises:
        SettingsError: A number means nothing.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        *,
        hidden: int | None = None,
        top_k: int = 2,
        capacity_factor: float | None = None,
        balance: float = 0.01,
        experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise SettingsError(
                f"top_k must be between 1 and num_experts({num_experts}), but got {top_k}; choose another"
            )
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise SettingsError(f"capacity_factor must be more than 0, but got {capacity_factor!r}; None drops nothing")
        if not 0 <= balance < math.inf:
            raise SettingsError(f"balance must be at least 0, but got {balance!r}; 0 balances nothing")
        self.num_experts, self.top_k = num_experts, top_k
        self.capacity_factor, self.balance = capacity_factor, balance
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = experts if experts is not None else Experts(width, num_experts, hidden or 4 * width)
        self.most_tokens: int | None = None
        """Most tokens of the last forward that an expert took; None for all."""
        self._unevenness: Tensor | None = None
        self._counts_E1: Tensor | None = None
        self._is_forward_over = True

    @property
    def needs_whole_samples(self) -> bool:
        """Whether the layer must see all tokens of a sample at once."""
        return self.balance > 0 or self.capacity_factor is not None

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return the sum of each token's experts, each times its weight.

        Raises:
            SettingsError: The input has not three dims.
        """
        if x_BTW.dim() != 3:
            raise SettingsError(
                "the input of a MixtureOfExperts must have the shape (samples, tokens, width), but got "
                f"{tuple(x_BTW.shape)}; its capacity and balance are those of a sample"
            )
        dtype = torch.promote_types(x_BTW.dtype, torch.float32)
        with torch.autocast(x_BTW.device.type, enabled=False):  # 16 bits would choose among equals
            logits_BTE = F.linear(x_BTW.to(dtype), self.router.weight.to(dtype))
        probability_BTE = logits_BTE.softmax(-1)
        weight_BTK, index_BTK = probability_BTE.topk(self.top_k)
        if self.top_k > 1:
            weight_BTK = weight_BTK / weight_BTK.sum(-1, keepdim=True)
        if self.training:
            index_BTK = self._route(probability_BTE, index_BTK)
        mixed_NW: Tensor = self.experts(x_BTW.flatten(0, 1), index_BTK.flatten(0, 1), weight_BTK.flatten(0, 1))
        return mixed_NW.view_as(x_BTW)

    def take_unevenness(self) -> Tensor | None:
        """Return the load-balancing losses of the last forward in training, without factor, and forget them.

        A model that uses the layer several times in a forward has as many of them, which are added up.
        """
        unevenness, self._unevenness = self._unevenness, None
        return unevenness

    def take_counts(self) -> list[int]:
        """Return how often each expert was used in training since the last call, and how often one was dropped."""
        counts, self._counts_E1 = self._counts_E1, None
        return [0] * (self.num_experts + 1) if counts is None else counts.tolist()

    def _route(self, probability_BTE: Tensor, index_BTK: Tensor) -> Tensor:
        """Return the experts that have room for each token, and note how even their use is."""
        wanted_BTKE = index_BTK[..., None] == torch.arange(self.num_experts, device=index_BTK.device)
        kept_BTK, self.most_tokens = index_BTK, None
        if self.capacity_factor is not None:
            num_wanted = index_BTK.shape[1] * self.top_k
            capacity = math.ceil(self.capacity_factor * num_wanted / self.num_experts)
            self.most_tokens = len(index_BTK) * capacity
            place_BSE = wanted_BTKE.flatten(1, 2).cumsum(1)
            place_BTK = place_BSE.view_as(wanted_BTKE).gather(-1, index_BTK[..., None]).squeeze(-1)
            kept_BTK = index_BTK.masked_fill(place_BTK > capacity, self.num_experts)
        share_BE = wanted_BTKE.flatten(1, 2).to(probability_BTE.dtype).mean(1)
        unevenness = self.num_experts * (share_BE * probability_BTE.mean(1)).sum(-1).mean() if self.balance else None
        self._note_use(kept_BTK, probability_BTE, unevenness)
        return kept_BTK

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_use(self, kept_BTK: Tensor, probability_BTE: Tensor, unevenness: Tensor | None) -> None:
        if torch._C._current_graph_task_id() != -1:  # in backward, which runs a recomputed block once more
            return
        counts_E1 = _count(kept_BTK.flatten(), self.num_experts + 1)
        self._counts_E1 = counts_E1 if self._counts_E1 is None else self._counts_E1 + counts_E1
        before = None if self._is_forward_over else self._unevenness
        self._unevenness = unevenness if before is None or unevenness is None else before + unevenness
        self._is_forward_over = not probability_BTE.requires_grad
        if probability_BTE.requires_grad:
            probability_BTE.register_hook(partial(_end_forward, weakref.ref(self)))


def _end_forward(layer: "weakref.ref[MixtureOfExperts]", gradient: Tensor) -> None:
    """Let the next use of a layer be the first of its forward, since backward has come to this one."""
    if (found := layer()) is not None:
        found._is_forward_over = True


class Routing(NamedTuple):
    """Use of a layer's experts."""

    layer: str
    """Name of the layer in the model."""
    counts: list[int]
    """Number of tokens that each expert took."""
    num_dropped: int
    """Number of times that a token's expert had no room for it."""


def balance_loss(module: nn.Module) -> Tensor:
    """Return the load-balancing losses of a model's last forward, each times its `MixtureOfExperts.balance`, 0-dim.

    Of Switch Transformers (Fedus 2021), for each sample: E times the sum over experts of the share of tokens that want
    an expert times its mean probability; 1 if all are used evenly, and E at most. A mean over samples, to be added to
    the mean of the training loss. It is 0 in evaluation, and for a model without such layers.
    """
    losses = [
        layer.balance * loss for _, layer in list_mixtures(module) if (loss := layer.take_unevenness()) is not None
    ]
    return torch.stack(losses).sum() if losses else torch.zeros(())


def take_routing(module: nn.Module) -> list[Routing]:
    """Return the use of experts in training since the last call, for this rank's tokens, by layer."""
    counts = [(name, layer.take_counts()) for name, layer in list_mixtures(module)]
    return [Routing(name, used, dropped) for name, (*used, dropped) in counts]


def list_mixtures(module: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """Yield the mixture-of-experts layers of a model that are of this kind, with their names."""
    for name, part in module.named_modules():
        if isinstance(part, MixtureOfExperts):
            yield name, part


def count_experts(index_NK: Tensor, num_experts: int) -> Tensor:
    """Return how often `index_NK` names each expert."""
    return _count(index_NK.flatten(), num_experts + 1)[:num_experts]


@contextmanager
def used_unevenly() -> Iterator[None]:
    """While active, a rehearsal's tokens use the experts of its rank as often as they can; else all are used evenly."""
    global _is_uneven
    before, _is_uneven = _is_uneven, True
    try:
        yield
    finally:
        _is_uneven = before


def suppose_counts(num_choices: int, num_experts: int, most: int, first: int = 0) -> list[int]:
    """Return how often each expert is used in a rehearsal.

    Args:
        num_choices: Number of tokens, times the experts of each.
        num_experts: Number of experts.
        most: Most tokens that an expert can get.
        first: First of the experts that get as many as they can, where use is uneven.
    """
    if not _is_uneven:
        return [min((num_choices + place) // num_experts, most) for place in range(num_experts)]
    places = [(place - first) % num_experts for place in range(num_experts)]
    return [max(0, min(most, num_choices - most * place)) for place in places]


def _read_counts(index_NK: Tensor, num_experts: int) -> list[int]:
    if isinstance(index_NK, FakeTensor):
        return suppose_counts(index_NK.numel(), num_experts, len(index_NK))
    counts: list[int] = count_experts(index_NK, num_experts).tolist()
    return counts


def _count(index: Tensor, num_values: int) -> Tensor:
    return index.new_zeros(num_values).scatter_add(0, index, torch.ones_like(index))
