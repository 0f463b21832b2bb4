"""PowerSGD: a matrix is sent as the product of two thin ones.

Shapes: N rows, M columns, R low rank. Q is stored as ``(R, M)``, and P is computed by columns: as ``(M, R)`` and by
rows the products take up to six times as long on a CPU.
"""

import functools
import math
from collections.abc import Iterator
from typing import cast

import torch
from pydantic import Field
from torch import Size, Tensor

from paceline.comm.streams import send_to
from paceline.compression.codec import (
    Algebra,
    AllReduce,
    Codec,
    CodecContext,
    Exchange,
    Exchanged,
    Request,
    State,
    dense_payloads,
    exchange_dense,
    flag_of,
    shared_generator,
)
from paceline.registry import register

_CHUNK_ELEMENTS = 1 << 17
"""Number of elements of a product computed at a time on a CPU."""
_ROUNDING = 1e-6
"""Remaining part of a column that depends on others: some units of fp32's precision."""


@register("power_sgd")
class PowerSGD(Codec):
    """One step of subspace iteration per training step, warm-started from the last (Vogels, Karimireddy, Jaggi 2019).

    A block of shape ``(N, ...)`` is a matrix of N rows and M columns. Workers sum P = X_i Q, orthonormalise it, sum
    Q = X_i^T P, and take P Q^T for the sum of their X_i. A worker's residual is X_i - P (X_i^T P)^T, from its own
    product: with the product of the sum it would grow without bound if workers see different data. If the sum's rank
    is at most `low_rank`, the result is exact.

    Unlike in the paper, columns of Q are scaled to length 1 before use. A column of Q that has become zero is drawn
    again, and so is a column of P that depends on the others: otherwise a block whose gradients were zero, or cancelled
    out, for a while might never send anything again.

    On the wire: two all-reduces of R * N and R * M values, 4 bytes each. Vectors, and matrices that this would not
    make smaller, are summed uncompressed.
    """

    algebra = Algebra.LINEAR
    suits_steps = True

    low_rank: int = Field(default=4, ge=1)
    """Number of columns of P and Q."""
    error_feedback: bool = True
    """Whether the error is added to the next step's value."""

    def exchange(self, value: Tensor, state: State, context: CodecContext) -> Exchange:
        """Sum P, then Q."""
        if self.is_dense(value.shape):
            return (yield from exchange_dense(value))
        x_NM = value.view(_matrix_shape(value.shape))
        if self.error_feedback:
            x_NM = x_NM + state["worker"].view_as(x_NM) if "worker" in state else x_NM.clone()
        p_NR = x_NM @ self._start(x_NM, state, context).t()
        finite = flag_of(p_NR.isfinite().all())
        p_NR = _orthonormalise(_own((yield AllReduce(p_NR.view(-1))), p_NR), context)
        q_RM = p_NR.t() @ x_NM
        if self.error_feedback:
            _subtract_product(x_NM, p_NR, q_RM)
        q_RM = _own((yield AllReduce(q_RM.view(-1), finite)), q_RM)
        total = _multiply(p_NR, q_RM).view_as(value)
        kept = {"q": q_RM, "worker": x_NM.view_as(value)} if self.error_feedback else {"q": q_RM}
        return Exchanged(total, kept, finite)

    def contraction(self, shape: Size) -> float:
        """Return the share of the largest singular values of a random matrix (Marchenko and Pastur 1967)."""
        if self.is_dense(shape):
            return 1.0
        num_rows, num_columns = _matrix_shape(shape)
        return min(1.0, self.low_rank * (1 / math.sqrt(num_rows) + 1 / math.sqrt(num_columns)) ** 2)

    def payloads(self, shape: Size, num_workers: int) -> list[tuple[type[Request], int]]:
        """Two rounds, P and Q."""
        if self.is_dense(shape):
            return dense_payloads(shape)
        return [(AllReduce, 4 * self.low_rank * size) for size in _matrix_shape(shape)]

    def is_dense(self, shape: Size) -> bool:
        """Whether a block of `shape` is small, or P and Q would be no smaller."""
        num_rows, num_columns = _matrix_shape(shape)
        return super().is_dense(shape) or self.low_rank * (num_rows + num_columns) >= num_rows * num_columns

    def _start(self, x_NM: Tensor, state: State, context: CodecContext) -> Tensor:
        """Return Q of the last step, with columns of length 1; random columns in place of zero ones."""
        if "q" not in state or len(state["q"]) != self.low_rank:
            return self._draw(x_NM, context)
        lengths = _measure(state["q"], 1).unsqueeze(1)
        scaled = (state["q"] / lengths).float()
        if x_NM.device.type == "cpu":
            return scaled if (lengths > 0).all() else torch.where(lengths > 0, scaled, self._draw(x_NM, context))
        return torch.where(
            lengths > 0, scaled, send_to(x_NM.device, _draw_once(context.seed, context.block, scaled.shape))
        )

    def _draw(self, x_NM: Tensor, context: CodecContext) -> Tensor:
        size = (self.low_rank, x_NM.shape[1])
        return torch.randn(size, dtype=torch.float32, generator=shared_generator(context)).to(x_NM.device)


@functools.lru_cache(maxsize=4096)
def _draw_once(seed: int, block: str, shape: Size) -> Tensor:
    """Return random columns of a block, the same in every step: on a GPU the host does not know whether one is used."""
    generator = shared_generator(CodecContext(block, 0, rank=0, num_workers=1, seed=seed))
    return torch.randn(shape, dtype=torch.float32, generator=generator)


def _matrix_shape(shape: Size) -> tuple[int, int]:
    num_rows = shape[0] if shape else 1
    return num_rows, shape.numel() // max(num_rows, 1)


def _own(summed: Tensor, like: Tensor) -> Tensor:
    """Return a copy of a sum, outside the message that contains it.

    The state must not keep the whole message alive. And linear algebra may round by a buffer's alignment, which is the
    same for all buffers that torch allocates, so that all workers get the same bits.
    """
    return summed.clone().view_as(like)


def _measure(tensor: Tensor, dim: int) -> Tensor:
    """Return lengths along `dim`, in double precision: in single, squares of 1e-23 are zero and of 1e20 infinite."""
    return cast(Tensor, torch.linalg.vector_norm(tensor, dim=dim, dtype=torch.float64))


def _orthonormalise(p_NR: Tensor, context: CodecContext) -> Tensor:
    """Return orthonormal columns that span those of `p_NR`; random ones for columns that depend on earlier ones."""
    columns, factors_RR = torch.linalg.qr(p_NR)
    dependent = factors_RR.diagonal().abs() <= _ROUNDING * _measure(factors_RR, 0)
    if p_NR.device.type != "cpu":
        spare_NR = send_to(p_NR.device, _draw_once(context.seed, f"{context.block} rows", p_NR.shape))
        columns, _ = torch.linalg.qr(torch.where(dependent, spare_NR, p_NR))
    elif dependent.any():
        drawn_NR = torch.randn(p_NR.shape, dtype=torch.float32, generator=shared_generator(context)).to(p_NR.device)
        columns, _ = torch.linalg.qr(torch.where(dependent, drawn_NR, p_NR))
    return cast(Tensor, columns)


def _subtract_product(x_NM: Tensor, p_NR: Tensor, q_RM: Tensor) -> None:
    for x, p in _row_chunks(x_NM, p_NR):
        x.addmm_(p, q_RM, alpha=-1)


def _multiply(p_NR: Tensor, q_RM: Tensor) -> Tensor:
    product_NM = p_NR.new_empty(len(p_NR), q_RM.shape[1])
    for x, p in _row_chunks(product_NM, p_NR):
        torch.mm(p, q_RM, out=x)
    return product_NM


def _row_chunks(x_NM: Tensor, p_NR: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return matching rows of both: on a CPU few at a time, since the whole product leaves its cache."""
    rows = len(x_NM) if x_NM.is_cuda else max(_CHUNK_ELEMENTS // x_NM.shape[1], 1)
    return zip(x_NM.split(rows), p_NR.split(rows), strict=True)
