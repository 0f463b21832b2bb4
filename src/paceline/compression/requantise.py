"""Sums with codecs whose payloads cannot be added: owners of a part decode, add and encode again."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Size, Tensor

from paceline.compression.codec import (
    Algebra,
    AllGather,
    AllToAll,
    Codec,
    CodecContext,
    Exchange,
    Exchanged,
    Flag,
    Request,
    State,
    flag_of,
    is_finite,
)
from paceline.compression.kernels import find_kernels
from paceline.compression.rows import RowLayout
from paceline.errors import SettingsError


class Requantise(Codec):
    """Base of codecs that encode tiles, each with its own scale.

    Each worker owns a row of whole tiles. It gets that row from all, decodes and adds in fp32 in the order of ranks,
    encodes the sum, and all workers decode the same rows: two roundings whatever the number of workers, where a ring
    would round at each hop. Both sites are lossy and have residuals: the workers' have the size of the block, and the
    owners' that of a row. Since tiles stay where they are, the number of owners changes only who computes.

    On the wire: an all-to-all and an all-gather of the payload, together 2(n-1)/n of its size, like an all-reduce.
    All rows have one size, so blocks of few tiles fill them badly.
    """

    algebra = Algebra.REQUANTISE
    tile: ClassVar[int]
    bits: ClassVar[int]

    error_feedback: bool = True
    """Whether encoding errors, of workers and owners, are added to the values that they encode next."""

    def exchange(self, value: Tensor, state: State, context: CodecContext) -> Exchange:
        """Scatter rows, sum the own one, gather the sums."""
        if self.is_dense(value.shape):
            return (yield from _exchange_dense(value, context))
        rows = self._rows(value.shape, context.num_workers)
        kernels = find_kernels(self.name, value.device)
        part = rows.part(context.rank)
        _check_owner(state, part.stop - part.start, context)

        payload, worker, is_finite = self._encode(value.view(-1), state.get("worker"), rows, "worker", context)
        received = _aligned((yield AllToAll(payload)))
        total = value.new_empty(part.stop - part.start)
        for sender in range(context.num_workers):
            kernels.decode(received[sender : sender + 1], rows, total, add=sender > 0)

        payload, owner, is_sum_finite = self._encode(total, state.get("owner"), rows, "owner", context)
        if is_sum_finite is not True:  # if every worker's value was finite, the sum is too large
            is_finite &= is_sum_finite | (flag_of(_scales(received, rows).isfinite().all()) ^ True)
        gathered = _aligned((yield AllGather(payload[0], is_finite)))
        summed = torch.empty_like(value)
        kernels.decode(gathered, rows, summed.view(-1))
        kept = {"worker": worker.view(value.shape), "owner": owner} if self.error_feedback else {}
        return Exchanged(summed, kept, is_finite)

    def residual(self, state: State, shape: Size, rank: int, num_workers: int) -> Tensor | None:
        """Return the worker's residual, with the owner's in its place."""
        kept = super().residual(state, shape, rank, num_workers)
        if kept is None or "owner" not in state:
            return kept
        kept = kept.clone()
        kept.view(-1)[self._rows(shape, num_workers).part(rank)] += state["owner"].flatten()
        return kept

    def payloads(self, shape: Size, num_workers: int) -> list[tuple[type[Request], int]]:
        """All rows, then one row of sums."""
        is_dense = self.is_dense(shape)
        row_bytes = 4 * -(-shape.numel() // num_workers) if is_dense else self._rows(shape, num_workers).row_bytes
        return [(AllToAll, num_workers * row_bytes), (AllGather, row_bytes)]

    @abstractmethod
    def _options(self, site: str, rows: RowLayout, context: CodecContext) -> dict[str, int | None]:
        """Return further arguments of this codec's `encode`."""

    def _rows(self, shape: Size, num_workers: int) -> RowLayout:
        return RowLayout(shape.numel(), num_workers, self.tile, self.bits)

    def _encode(
        self, value: Tensor, residual: Tensor | None, rows: RowLayout, site: str, context: CodecContext
    ) -> tuple[Tensor, Tensor, Flag]:
        """Return the payload, the encoding error (not filled without feedback), and whether the value was finite."""
        payload = rows.new_payload(value.device, 1 if site == "owner" else rows.num_rows)
        new_residual = torch.empty_like(value)
        old: Tensor | None = None
        if self.error_feedback:
            old = torch.zeros_like(value) if residual is None else residual.view(len(value))
        encode = find_kernels(self.name, value.device).encode
        is_finite = encode(
            value, old, rows, payload, None if old is None else new_residual, **self._options(site, rows, context)
        )
        return payload, new_residual, is_finite


def _exchange_dense(value: Tensor, context: CodecContext) -> Exchange:
    """Exchange a block uncompressed, summed by owners too: it travels in the messages of the other blocks."""
    finite = is_finite(value)
    rows = value.new_zeros(context.num_workers, -(-value.numel() // context.num_workers))
    rows.view(-1)[: value.numel()] = value.flatten()
    received = _aligned((yield AllToAll(rows.view(torch.uint8)))).flatten().view(torch.float32).view_as(rows)
    total = received[0].clone()
    for row in received[1:]:
        total += row
    gathered = _aligned((yield AllGather(total.view(torch.uint8), finite))).flatten().view(torch.float32)
    return Exchanged(gathered[: value.numel()].view(value.shape).clone(), is_finite=finite)


def _check_owner(state: State, num_owned: int, context: CodecContext) -> None:
    if "owner" in state and len(state["owner"]) != num_owned:
        raise SettingsError(
            f"the owner residual of block {context.block!r} must have the {num_owned} elements that rank "
            f"{context.rank} of {context.num_workers} owns, but got {len(state['owner'])}; first `resize` the states "
            "of all workers"
        )


def _aligned(rows: Tensor) -> Tensor:
    """Return received rows in memory where scales can be read as numbers."""
    is_aligned = rows.is_contiguous() and rows.data_ptr() % 4 == 0
    return rows if is_aligned else rows.clone(memory_format=torch.contiguous_format)


def _scales(payload: Tensor, rows: RowLayout) -> Tensor:
    return payload[:, : rows.codes_begin].clone(memory_format=torch.contiguous_format).view(torch.float32)
