"""Tokens on their way to the ranks that have their experts, and back.

Shapes: N tokens of this rank, K experts of a token, W width, E experts, n ranks, R rows that each sends to each, M rows
that arrive.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from paceline.comm.group import Group
from paceline.parallel.mixture_of_experts import sort_by_expert


class TokenExchange:
    """Sends the tokens of a module of experts to the ranks that have them, and takes the results back.

    Expert parallelism of GShard (Lepikhin 2020) by all-to-all, without padding to a capacity: ranks tell each other how
    many tokens go where, and messages are as long as the longest of them. On the wire each rank sends, times (n-1)/n,
    if experts are evenly used, ``K * N * W`` numbers twice in forward and twice in backward, and 8 bytes an expert to
    each rank before; the host waits for these.

    Args:
        name: Name of the module in errors.
        module: Module of experts, of which this rank has a part already.
        group: Ranks that share the experts, for these exchanges alone.
        num_experts: Number of all experts.
    """

    def __init__(self, name: str, module: nn.Module, group: Group, num_experts: int) -> None:
        self._name, self._group, self._num_experts = name, group, num_experts
        self._signature = inspect.signature(module.forward)
        self._sent_bytes = 0
        self._route: _Route | None = None
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave)

    def take_sent_bytes(self) -> int:
        """Return the bytes that were sent since the last call."""
        sent, self._sent_bytes = self._sent_bytes, 0
        return sent

    def swap(self, rows_nRW: Tensor) -> Tensor:
        """Send each rank its row, and return what the ranks have sent to this one."""
        received = torch.empty_like(rows_nRW)
        with _disable_current_modes():  # selective recomputation must not see the group's tensor operations
            self._group.all_to_all(received, rows_nRW.contiguous(), name=f"tokens of {self._name}").wait()
        self._sent_bytes += rows_nRW.nbytes // self._group.size * (self._group.size - 1)
        return received

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # exchanges are no part of a graph
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        x_NW, index_NK, weight_NK = [*self._signature.bind(*args, **kwargs).arguments.values()][:3]
        self._route = route = self._plan(x_NW, index_NK, weight_NK)
        received = self._move(x_NW[route.token], route.sent_to, route.received_at, route.num_rows)
        if not len(route.expert):  # a row of zeros, so that its experts have a gradient and backward sends as others'
            received = nn.functional.pad(received, (0, 0, 0, 1))
        expert_M1 = route.expert.new_zeros(1, 1) if not len(route.expert) else route.expert[:, None]
        return (received, expert_M1, weight_NK.new_ones(expert_M1.shape)), {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, module: nn.Module, args: Any, output_MW: Tensor) -> Tensor:
        route = self._route
        assert route is not None
        self._route = None
        output_MW = output_MW[: len(route.expert)]
        returned = self._move(output_MW, route.received_at, route.sent_to, route.num_rows)
        weighted = (returned * route.weight[:, None]).to(output_MW.dtype)
        return weighted.new_zeros(route.num_tokens, weighted.shape[1]).index_add(0, route.token, weighted)

    def _plan(self, x_NW: Tensor, index_NK: Tensor, weight_NK: Tensor) -> "_Route":
        """Return the way of this rank's tokens, once all ranks have told how many go to each expert."""
        group, device = self._group, index_NK.device
        order, counts = sort_by_expert(index_NK, self._num_experts)
        everybody = torch.zeros(group.size, self._num_experts, dtype=torch.int64, device=device)
        with _disable_current_modes():
            mine = torch.tensor(counts, device=device)
            group.all_gather(everybody, mine, name=f"numbers of tokens of {self._name}").wait()
            self._sent_bytes += mine.nbytes * (group.size - 1)
            # By source, destination and its experts.
            counts_nnE = everybody.cpu().unflatten(1, (group.size, -1))
            arriving_nE = counts_nnE[:, group.rank]
            num_rows = int(counts_nnE.sum(2).max())
            experts = torch.arange(arriving_nE.shape[1]).repeat(group.size)
            return _Route(
                len(x_NW),
                num_rows,
                order // index_NK.shape[1],
                weight_NK.flatten()[order],
                _list_slots(counts_nnE[group.rank].sum(1), num_rows).to(device),
                _list_slots(arriving_nE.sum(1), num_rows).to(device),
                experts.repeat_interleave(arriving_nE.flatten()).to(device),
            )

    def _move(self, rows: Tensor, slots: Tensor, taken: Tensor, num_rows: int) -> Tensor:
        """Put rows into `slots` of the message to all ranks, and return those `taken` of the message from all."""
        size = self._group.size
        message = rows.new_zeros(size * num_rows, rows.shape[1]).index_copy(0, slots, rows)
        if not num_rows:
            return message
        swapped: Tensor = _Swap.apply(message.view(size, num_rows, -1), self)  # type: ignore[no-untyped-call]
        return swapped.flatten(0, 1).index_select(0, taken)


class _Route(NamedTuple):
    """The way of some tokens to their experts and back."""

    num_tokens: int
    num_rows: int
    """Rows of each message."""
    token: Tensor
    """Token of each row that is sent, by expert."""
    weight: Tensor
    """Weight of the expert of that row."""
    sent_to: Tensor
    """Slot of that row among those to all ranks."""
    received_at: Tensor
    """Slot of each row that arrives, by rank and expert."""
    expert: Tensor
    """Expert of that row, counted from this rank's first."""


def _list_slots(counts: Tensor, num_rows: int) -> Tensor:
    """Return the filled slots of messages of `num_rows`, of which the first `counts` are filled."""
    return torch.cat([torch.arange(count) + index * num_rows for index, count in enumerate(counts.tolist())])


class _Swap(torch.autograd.Function):
    """An all-to-all, whose gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, rows_nRW: Tensor, exchange: TokenExchange) -> Tensor:
        """Return what all ranks have sent to this one."""
        ctx.exchange = exchange
        return exchange.swap(rows_nRW)

    @staticmethod
    def backward(ctx: Any, gradient_nRW: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of what this rank has sent."""
        return ctx.exchange.swap(gradient_nRW), None
