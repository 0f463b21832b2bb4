"""Tokens on their way to the ranks that have their experts, and back.

Shapes: N tokens of this rank, K experts of a token, W width, E experts, n ranks, R rows that each sends to each, M rows
that arrive.
"""

import inspect
from typing import Any, NamedTuple

import numpy
import numpy.typing
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import keystr, tree_map_with_path

from paceline.comm.group import Group
from paceline.comm.streams import send_to
from paceline.errors import SettingsError
from paceline.parallel.mixture_of_experts import Experts, MixtureOfExperts, count_experts, suppose_counts
from paceline.parallel.second_order import differentiated_once


class TokenExchange:
    """Sends the tokens of a module of experts to the ranks that have them, and takes the results back.

    Expert parallelism of GShard (Lepikhin 2020) by all-to-all, without padding to a capacity: ranks tell each other how
    many tokens go where, and messages are as long as the longest of them. On the wire each rank sends, times (n-1)/n,
    if experts are evenly used, ``K * N * W`` numbers twice in forward and twice in backward, and 8 bytes an expert to
    each rank before; the host waits for these, once a forward.

    Arguments of the experts after the third go with the tokens where their first dim is the tokens', which the first
    forward decides; all others, such as a factor, are as this rank passes them.

    Args:
        name: Name of the module in errors.
        module: Module of experts, of which this rank has a part already.
        group: Ranks that share the experts, for these exchanges alone.
        num_experts: Number of all experts.
        mixture: Layer of these experts, if it is known: a rehearsal asks it for its capacity.
    """

    def __init__(
        self, name: str, module: nn.Module, group: Group, num_experts: int, mixture: MixtureOfExperts | None = None
    ) -> None:
        self._name, self._group, self._num_experts, self._mixture = name, group, num_experts, mixture
        self._signature = inspect.signature(module.forward)
        self._sent_bytes = 0
        self._has_rows: dict[str, bool] = {}
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
        given = self._signature.bind(*args, **kwargs)
        first = [*given.arguments][:3]
        x_NW, index_NK, weight_NK = (given.arguments[name] for name in first)
        self._route = route = self._plan(x_NW, index_NK, weight_NK)
        expert_M1 = route.expert[:, None] if len(route.expert) else route.expert.new_zeros(1, 1)
        sent = self._send(x_NW[route.token], route), expert_M1, weight_NK.new_ones(expert_M1.shape)
        further = {name: value for name, value in given.arguments.items() if name not in first}
        given.arguments.update(zip(first, sent, strict=True))
        given.arguments.update(tree_map_with_path(lambda path, leaf: self._pass_on(keystr(path), leaf), further))
        if isinstance(module, Experts):
            given.arguments["counts"] = route.counts
        return given.args, given.kwargs

    def _pass_on(self, path: str, leaf: Any) -> Any:
        """Return what this rank's experts get of a further argument: the rows of their tokens, or all of it."""
        route = self._route
        assert route is not None
        if not isinstance(leaf, Tensor):
            return leaf
        num_tokens, num_choices = route.num_tokens, route.num_choices
        is_rows = leaf.dim() > 0 and len(leaf) == num_tokens
        if not self._has_rows.setdefault(path, is_rows):
            return leaf
        if not is_rows:
            raise SettingsError(
                f"argument {path} of {self._name} must have a row for each of {num_tokens} tokens, as it had in the "
                f"first forward, but got the shape {tuple(leaf.shape)}; pass it with as many rows as tokens each time"
            )
        if leaf.shape[1:2] == (num_choices,):  # a number of each expert of a token
            return self._send(leaf.flatten(0, 1)[route.choice][:, None], route)
        return self._send(leaf[route.token], route)

    def _send(self, rows: Tensor, route: "_Route") -> Tensor:
        """Return the rows that arrive for this rank's experts, by expert."""
        sent = rows.byte() if rows.dtype == torch.bool else rows
        received = self._move(sent, route.sent_to, route.received_at, route.num_rows).to(rows.dtype)
        if len(route.expert):
            return received
        # A row of zeros, so that its experts have a gradient and backward sends as others'.
        return torch.cat([received, received.new_zeros(1, *received.shape[1:])])

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
        rank, device = self._group.rank, index_NK.device
        counts_nnE = self._tell_counts(index_NK).reshape(self._group.size, self._group.size, -1)
        sent_n, arriving_nE = counts_nnE[rank].sum(1), counts_nnE[:, rank]
        num_rows = int(counts_nnE.sum(2).max())
        experts = torch.arange(arriving_nE.shape[1]).repeat(self._group.size)
        choice = index_NK.flatten().argsort(stable=True)[: int(sent_n.sum())]
        counts = arriving_nE.sum(0).tolist()
        expert = experts.repeat_interleave(torch.tensor(arriving_nE.flatten()), output_size=sum(counts))
        return _Route(
            len(x_NW),
            index_NK.shape[1],
            num_rows,
            counts if sum(counts) else [1, *counts[1:]],
            choice,
            choice // index_NK.shape[1],
            weight_NK.flatten()[choice],
            send_to(device, _list_slots(sent_n, num_rows)),
            send_to(device, _list_slots(arriving_nE.sum(1), num_rows)),
            send_to(device, expert),
        )

    def _tell_counts(self, index_NK: Tensor) -> "numpy.typing.NDArray[numpy.int64]":
        """Return how many tokens of each rank go to each expert, which all ranks tell each other."""
        mine_E = count_experts(index_NK, self._num_experts)
        everybody = mine_E.new_zeros(self._group.size, self._num_experts)
        if isinstance(index_NK, FakeTensor):
            return numpy.array([self._suppose_counts(index_NK)] * self._group.size)
        with _disable_current_modes():
            self._group.all_gather(everybody, mine_E, name=f"numbers of tokens of {self._name}").wait()
            self._sent_bytes += mine_E.nbytes * (self._group.size - 1)
            return numpy.array(everybody.tolist())  # the only wait of the host

    def _suppose_counts(self, index_NK: Tensor) -> list[int]:
        """Return how many tokens of each rank go to each expert in a rehearsal."""
        most = self._mixture.most_tokens if self._mixture is not None else None
        most = len(index_NK) if most is None else min(most, len(index_NK))
        first = self._group.rank * self._num_experts // self._group.size
        return suppose_counts(index_NK.numel(), self._num_experts, most, first)

    def _move(self, rows: Tensor, slots: Tensor, taken: Tensor, num_rows: int) -> Tensor:
        """Put rows into `slots` of the message to all ranks, and return those `taken` of the message from all."""
        size = self._group.size
        message = rows.new_zeros(size * num_rows, *rows.shape[1:]).index_copy(0, slots, rows)
        if not num_rows:
            return message
        swapped: Tensor = _Swap.apply(message.unflatten(0, (size, num_rows)), self)  # type: ignore[no-untyped-call]
        return differentiated_once(swapped, "expert").flatten(0, 1).index_select(0, taken)


class _Route(NamedTuple):
    """The way of some tokens to their experts and back."""

    num_tokens: int
    num_choices: int
    """Experts of a token."""
    num_rows: int
    """Rows of each message."""
    counts: list[int]
    """Rows of each of this rank's experts, a row of zeros included if there are none."""
    choice: Tensor
    """Choice, counted through all tokens, of each row that is sent, by expert."""
    token: Tensor
    """Token of that row."""
    weight: Tensor
    """Weight of the expert of that row."""
    sent_to: Tensor
    """Slot of that row among those to all ranks."""
    received_at: Tensor
    """Slot of each row that arrives, by rank and expert."""
    expert: Tensor
    """Expert of that row, counted from this rank's first."""


def _list_slots(counts: "numpy.typing.NDArray[numpy.int64]", num_rows: int) -> Tensor:
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
