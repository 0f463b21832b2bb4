"""Operators of a training step as numbers: flops, bytes and shape, by class."""

from dataclasses import dataclass, field
from enum import IntEnum


class Kind(IntEnum):
    """Class of an operator: each has its own efficiency."""

    MATRIX = 0
    """Product with a weight."""
    CONVOLUTION = 1
    """Convolution, as the product that it is."""
    BATCHED = 2
    """Many small products of activations: attention whose scores are written to memory."""
    FUSED = 3
    """Attention in one kernel, whose scores never leave the chip."""
    POINTWISE = 4
    """Operators that only move bytes: norms, activations, residuals, softmax, copies."""
    LOSS = 5
    """The same over the scores of all words of a vocabulary."""


@dataclass
class Operators:
    """Columns of numbers, one row for each operator of one micro-batch on one rank."""

    kinds: list[int] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    num_bytes: list[float] = field(default_factory=list)
    rows: list[float] = field(default_factory=list)
    columns: list[float] = field(default_factory=list)
    depths: list[float] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)

    def add_product(
        self, kind: Kind, rows: float, columns: float, depth: float, *, element_bytes: float, batch: float = 1.0,
        count: float = 1.0, flops: float | None = None,
    ) -> None:  # fmt: skip
        """Add `count` products of (rows x depth) by (depth x columns), `batch` at once."""
        moved = element_bytes * batch * (rows * depth + depth * columns + rows * columns)
        self._add(kind, 2 * batch * rows * columns * depth if flops is None else flops, moved, count)
        self.rows[-1], self.columns[-1], self.depths[-1], self.batches[-1] = rows, columns, depth, batch

    def add_weight(
        self, kind: Kind, rows: float, columns: float, depth: float, *, element_bytes: float, forward: float,
        backward: bool = True, count: float = 1.0,
    ) -> None:  # fmt: skip
        """Add the products with one weight: `forward` times forward, and the two of backward."""
        self.add_product(kind, rows, columns, depth, element_bytes=element_bytes, count=count * forward)
        if backward:
            self.add_product(kind, rows, depth, columns, element_bytes=element_bytes, count=count)
            self.add_product(kind, depth, columns, rows, element_bytes=element_bytes, count=count)

    def add_bytes(self, kind: Kind, num_bytes: float, count: float = 1.0) -> None:
        """Add operators that move bytes."""
        self._add(kind, 0.0, num_bytes, count)

    def _add(self, kind: Kind, flops: float, num_bytes: float, count: float) -> None:
        self.kinds.append(int(kind))
        self.flops.append(flops)
        self.num_bytes.append(num_bytes)
        for column in (self.rows, self.columns, self.depths, self.batches):
            column.append(1.0)
        self.counts.append(count)


@dataclass(frozen=True)
class WorkSlice:
    """Part of a step that one rank computes at once.

    Args:
        samples: Samples of a micro-batch.
        tokens: Tokens of each sample on this rank.
        sequence: Tokens of each whole sample.
        tensor: Ranks that share each matrix.
        is_split: Whether these ranks share the operators between the matrices too (sequence parallel).
        element_bytes: Bytes of an activation.
        weight_bytes: Bytes of an element of a matrix product: fewer in fp8.
        is_fused: Whether attention is one kernel.
        recomputed: Share of forward's matrix products that backward computes again.
        recomputes_attention: Whether backward computes attention again.
        recomputed_bytes: Share of forward's pointwise bytes that backward computes again.
        is_compiled: Whether a compiler makes one kernel of operators that follow each other.
    """

    samples: float
    tokens: float
    sequence: float
    tensor: int
    is_split: bool
    element_bytes: float
    weight_bytes: float
    is_fused: bool
    recomputed: float
    recomputes_attention: bool
    recomputed_bytes: float
    is_compiled: bool = False


@dataclass(frozen=True)
class Workload:
    """What a model does with one micro-batch on one rank, and what it keeps.

    Args:
        blocks: Operators of all blocks.
        head: Operators of embedding, head and loss.
        block_parameters: Parameters of all blocks on one of the tensor ranks.
        embedding_parameters: Parameters of the embedding on one of the tensor ranks.
        head_parameters: Parameters of the head; 0 if it is the embedding's.
        boundary_elements: Elements that one block gives to the next.
        block_reductions: All-reduces of boundary elements that tensor ranks need for all blocks.
        context_elements: Elements of keys and values that context ranks exchange, of all blocks.
        kernels: Kernels that all blocks start, forward and backward.
        kept_bytes: Bytes that all blocks keep for backward without recomputation.
        kept_scores_bytes: Bytes of attention's scores among them.
        kept_inputs_bytes: Bytes that are left of them with full recomputation: each block's input.
        head_bytes: Bytes that the head needs at once.
        kept_selective_bytes: Bytes that are left of them with selective recomputation, where that is known.
        tied_parameters: Parameters of the embedding that the head has too; None: all of them if the head has none.
        moves_all: Whether bytes are those of each operator of these, not those of an idealised kernel of several.
    """

    blocks: Operators
    head: Operators
    block_parameters: float
    embedding_parameters: float
    head_parameters: float
    boundary_elements: float
    block_reductions: float
    context_elements: float
    kernels: float
    kept_bytes: float
    kept_scores_bytes: float
    kept_inputs_bytes: float
    head_bytes: float
    kept_selective_bytes: float | None = None
    tied_parameters: float | None = None
    moves_all: bool = False
