"""A model whose operators were listed while it ran once: numbers by block, for any samples and any tensor ranks."""

from collections.abc import Iterator
from functools import cached_property
from math import gcd
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from paceline.errors import SettingsError
from paceline.registry import Settings, register
from paceline.simulator.training.operators import Kind, Operators, Workload, WorkSlice
from paceline.simulator.training.shapes import OWN_STACK, Count, ModelShape

Length = tuple[float, float]
"""A size: what it is without samples, and what each sample adds."""
Amount = tuple[float, float, float, float]
"""A quantity: what every tensor rank has whole, without samples and for each; and what they divide, likewise."""
NOTHING: Amount = (0.0, 0.0, 0.0, 0.0)
Dim = Literal["rows", "columns", "depth", "batch"]

_KINDS = {
    "matrix": Kind.MATRIX, "convolution": Kind.CONVOLUTION, "batched": Kind.BATCHED, "fused": Kind.FUSED,
}  # fmt: skip
_FULL_PRECISION_LOSS = 10.0
"""Bytes of a score that a loss in fp32 needs beside the score itself."""


class TracedProduct(Settings):
    """A product of matrices, (rows x depth) by (depth x columns), `batch` at once. A convolution counts as such."""

    kind: Literal["matrix", "convolution", "batched", "fused"]
    """Class of it."""
    rows: Length
    """Rows of the first matrix."""
    columns: Length
    """Columns of the second."""
    depth: Length
    """Length that is summed over."""
    batch: Length = (1.0, 0.0)
    """Number of such products in one operator."""
    shared: Dim | None = None
    """Size that tensor ranks divide; None: each computes all of it."""
    flops: Length | None = None
    """Flops, where they are not 2 x rows x columns x depth x batch: causal attention in one kernel."""
    elements: Length | None = None
    """Elements that it moves, where they are not those of the three matrices."""
    count: Count = 1
    """Number of operators like it."""

    def add(self, to: Operators, samples: float, tensor: int, element_bytes: float, times: float) -> None:
        """Add it to a list of operators, `times` its count."""
        sizes = {name: size(getattr(self, name), samples) for name in ("rows", "columns", "depth", "batch")}
        part = 1.0 if self.shared is None else 1.0 / tensor
        if self.shared is not None:
            sizes[self.shared] *= part
        flops = None if self.flops is None else size(self.flops, samples) * part
        to.add_product(
            _KINDS[self.kind], sizes["rows"], sizes["columns"], sizes["depth"], element_bytes=element_bytes,
            batch=sizes["batch"], count=self.count * times, flops=flops,
        )  # fmt: skip
        if self.elements is not None:
            to.num_bytes[-1] = size(self.elements, samples) * part * element_bytes

    @property
    def divided(self) -> float | None:
        """Length that tensor ranks divide, for one sample; None if none is."""
        return None if self.shared is None else sum(getattr(self, self.shared))


class TracedPass(Settings):
    """What a block does forward, or backward."""

    products: tuple[TracedProduct, ...] = ()
    """Products of matrices."""
    moved_elements: Amount = NOTHING
    """Floating-point elements that its other operators read and write."""
    fused_elements: Amount = NOTHING
    """Floating-point elements that are left of them where a compiler makes one kernel of several operators."""
    moved_bytes: Amount = NOTHING
    """Bytes that these move of other types: tokens, masks."""
    loss_elements: Amount = NOTHING
    """Floating-point elements that operators of the loss read and write."""
    kernels: float = 0.0
    """Operators that it starts."""

    def add(self, to: Operators, part: WorkSlice, samples: float, times: "Times") -> None:
        """Add its operators to a list."""
        for product in self.products:
            again = times.attention if product.kind in ("batched", "fused") else times.products
            element = 0.0 if product.kind == "fused" else part.element_bytes
            element = part.weight_bytes if product.kind == "matrix" else element
            product.add(to, samples, part.tensor, element, again)
        elements = self.fused_elements if part.is_compiled else self.moved_elements
        moved = amount(elements, samples, part.tensor) * part.element_bytes
        to.add_bytes(Kind.POINTWISE, moved + amount(self.moved_bytes, samples, part.tensor), times.bytes)
        if any(self.loss_elements):
            moved = amount(self.loss_elements, samples, part.tensor) * part.element_bytes
            to.add_bytes(Kind.LOSS, moved, times.bytes)


class Times(Settings):
    """Number of times that a pass runs: more than once where backward computes forward again."""

    products: float = 1.0
    """Products with weights, and convolutions."""
    attention: float = 1.0
    """Products of activations."""
    bytes: float = 1.0
    """All that only moves bytes."""


class TracedBlock(Settings):
    """A block, or several alike that follow each other. Amounts and sizes are those of one."""

    name: str
    """Name of the first."""
    count: Count = 1
    """Number of them."""
    forward: TracedPass
    """Work of forward."""
    backward: TracedPass
    """Work of backward."""
    parameters: Amount
    """Parameters of it."""
    kept_elements: Amount
    """Floating-point elements that it keeps for backward."""
    kept_bytes: Amount = NOTHING
    """Bytes that it keeps of other types."""
    kept_scores_elements: Amount = NOTHING
    """Elements of attention's scores among `kept_elements`."""
    kept_products_elements: Amount = NOTHING
    """Elements of results of its products: what selective recomputation keeps."""
    input_elements: Length
    """Floating-point elements that it reads: what full recomputation keeps."""
    output_elements: Length
    """Floating-point elements that it gives to the next."""
    reductions: float = 0.0
    """All-reduces of `output_elements` that tensor ranks need in it, forward and backward: a gather is half of one."""
    context_elements: Length = (0.0, 0.0)
    """Elements of keys and values, which context ranks exchange."""


class TracedEnds(Settings):
    """All that is in no block: embedding, stem, head and loss."""

    forward: TracedPass
    """Work of forward."""
    backward: TracedPass
    """Work of backward."""
    first_parameters: Amount = NOTHING
    """Parameters before the first block, and those before and after."""
    last_parameters: Amount = NOTHING
    """Parameters after the last block alone."""
    tied_parameters: Amount = NOTHING
    """Parameters before the first block that are used after the last one too, such as a tied embedding."""
    reductions_elements: Length = (0.0, 0.0)
    """Elements that tensor ranks all-reduce outside of blocks, forward and backward: a gather counts as half."""
    working_elements: Amount
    """Elements that head and loss need at once, beyond what blocks keep."""


@register("traced")
class TracedShape(ModelShape):
    """A model that was traced: `paceline.planner.trace_workload` makes it, of any module, on tensors without contents.

    A row of it has the sample, the attention and the tensor plan that the model was traced with.
    """

    title: str
    """Name for people."""
    digest: str = ""
    """Identifier of all that the trace depends on."""
    tokens: Count | None = None
    """Tokens of a sample, if it is a sequence."""
    image: Annotated[tuple[Count, ...], Field(min_length=3, max_length=3)] | None = None
    """Channels, height and width of a sample, if it is an image."""
    attention: Literal["eager", "fused"] = "eager"
    """Whether attention is one kernel."""
    blocks: Annotated[tuple[TracedBlock, ...], Field(min_length=1)]
    """Blocks, in the order of the model."""
    ends: TracedEnds
    """All else."""
    tensor_refusal: str = ""
    """Reason for which tensor ranks cannot share it; empty if they can."""
    cuts_tokens: bool = False
    """Whether tensor ranks share the tokens between matrices too (sequence parallel)."""
    uncounted: tuple[str, ...] = ()
    """Names of operators that could not be counted, or count as the most that they may be."""

    @model_validator(mode="after")
    def _check_sample(self) -> Self:
        if self.tokens is not None and self.image is not None:
            raise ValueError("a sample must be tokens or an image, but got both; leave one out")
        return self

    @property
    def reads_tokens(self) -> bool:
        """Whether a sample is a sequence."""
        return self.image is None

    @property
    def fixed(self) -> dict[str, Any]:
        """Fields of a row that the trace has settled."""
        sample = {"sample.tokens": self.tokens or 1} if self.image is None else {"sample.image": list(self.image)}
        return {
            **sample,
            **({"attention": self.attention} if self.reads_tokens else {}),
            "sequence_parallel": self.cuts_tokens,
            "stack": OWN_STACK,
        }

    @property
    def uncertain(self) -> tuple[str, ...]:
        """What the trace could not count."""
        return tuple(f"model: {name}" for name in self.uncounted)

    @property
    def num_blocks(self) -> int:
        """Its blocks, each of alike ones."""
        return sum(block.count for block in self.blocks)

    @property
    def likeness(self) -> str:
        """Model in closed form that is most like it."""
        kinds = {product.kind for block in self.blocks for product in block.forward.products}
        return "resnet" if "convolution" in kinds else "decoder" if kinds & {"batched", "fused"} else self.name

    @property
    def width(self) -> float:
        """Elements of a token between blocks, or of an image's pixel."""
        return max(1.0, size(self.blocks[-1].output_elements, 1.0) / (self.tokens or 1))

    @property
    def divided(self) -> dict[str, int] | None:
        """Greatest number that divides all that tensor ranks share; None if they can share nothing."""
        return None if self.tensor_refusal else {f"heads and features of {self.title}": self.tensor_divisor}

    @property
    def attends(self) -> bool:
        """Whether any block exchanges keys and values."""
        return any(any(block.context_elements) for block in self.blocks)

    def __hash__(self) -> int:
        """Return a hash of its digest: that of thousands of numbers would take longer than counting with them."""
        return hash((self.digest, self.title))

    @property
    def num_parameters(self) -> float:
        """Parameters of the whole model."""
        ends = amount(self.ends.first_parameters, 1, 1) + amount(self.ends.last_parameters, 1, 1)
        return ends + sum(block.count * amount(block.parameters, 1, 1) for block in self.blocks)

    @cached_property
    def tensor_divisor(self) -> int:
        """Number that the tensor ranks must divide, or nothing can be split evenly: 1 if nothing can be shared."""
        divided = [product.divided for product in self.list_products()]
        return gcd(*(round(length) for length in divided if length is not None))

    def list_products(self) -> Iterator[TracedProduct]:
        """Yield the products of all places, forward and backward."""
        places: tuple[TracedBlock | TracedEnds, ...] = (*self.blocks, self.ends)
        for place in places:
            yield from place.forward.products
            yield from place.backward.products

    def count(self, part: WorkSlice, image: tuple[int, ...]) -> Workload:
        """Return the operators that were traced, for other samples and ranks."""
        self._check(part)
        # Context ranks have a part of each sample's tokens, and all its keys and values.
        samples = part.samples * (part.tokens / self.tokens if self.tokens else 1.0)
        tensor = part.tensor
        again = Times(
            products=1.0 + part.recomputed, attention=1.0 + part.recomputes_attention, bytes=1.0 + part.recomputed_bytes
        )
        blocks, head = Operators(), Operators()
        for block in self.blocks:
            number = float(block.count)
            forward = Times(
                products=number * again.products, attention=number * again.attention, bytes=number * again.bytes
            )
            block.forward.add(blocks, part, samples, forward)
            block.backward.add(blocks, part, samples, Times(products=number, attention=number, bytes=number))
        self.ends.forward.add(head, part, samples, Times())
        self.ends.backward.add(head, part, samples, Times())
        boundary = sum(block.count * size(block.output_elements, samples) for block in self.blocks) / self.num_blocks
        element = part.element_bytes
        of_loss = (element + _FULL_PRECISION_LOSS) / (4 + _FULL_PRECISION_LOSS)
        ends_reductions = size(self.ends.reductions_elements, samples) / boundary if boundary else 0.0
        return Workload(
            blocks=blocks,
            head=head,
            block_parameters=self._sum("parameters", samples, tensor),
            embedding_parameters=amount(self.ends.first_parameters, samples, tensor),
            head_parameters=amount(self.ends.last_parameters, samples, tensor),
            tied_parameters=amount(self.ends.tied_parameters, samples, tensor),
            boundary_elements=boundary,
            block_reductions=sum(
                block.count * block.reductions * size(block.output_elements, samples) for block in self.blocks
            )
            / max(boundary, 1.0)
            + ends_reductions,
            context_elements=sum(block.count * size(block.context_elements, samples) for block in self.blocks) / tensor,
            kernels=sum(
                block.count * (block.forward.kernels * (1 + part.recomputed_bytes) + block.backward.kernels)
                for block in self.blocks
            ),
            kept_bytes=self._sum("kept_elements", samples, tensor) * element + self._sum("kept_bytes", samples, tensor),
            kept_scores_bytes=self._sum("kept_scores_elements", samples, tensor) * element,
            kept_inputs_bytes=self._sum_inputs(samples) / (tensor if self.cuts_tokens else 1) * element,
            kept_selective_bytes=self._sum("kept_products_elements", samples, tensor) * element,
            head_bytes=amount(self.ends.working_elements, samples, tensor) * 4 * of_loss,
            moves_all=True,
        )

    def _sum(self, field: str, samples: float, tensor: int) -> float:
        return sum(block.count * amount(getattr(block, field), samples, tensor) for block in self.blocks)

    def _sum_inputs(self, samples: float) -> float:
        return sum(block.count * size(block.input_elements, samples) for block in self.blocks)

    def _check(self, part: WorkSlice) -> None:
        if part.tensor > 1 and self.tensor_refusal:
            raise SettingsError(
                f"the tensor axis must be 1 for {self.title}, but got {part.tensor}: {self.tensor_refusal}"
            )
        if part.tensor > 1 and self.tensor_divisor % part.tensor:
            raise SettingsError(
                f"the tensor axis must divide {self.tensor_divisor}, the heads and features that {self.title} shares, "
                f"but got {part.tensor}; take one that does"
            )
        if self.tokens and part.tokens != self.tokens and not self.attends:
            raise SettingsError(
                f"the context axis must be 1 for {self.title}, which has no attention; take another axis"
            )


def size(length: Length, samples: float) -> float:
    """Return a size for a number of samples."""
    return length[0] + length[1] * samples


def amount(quantity: Amount, samples: float, tensor: int) -> float:
    """Return a quantity of one of `tensor` ranks, for a number of samples."""
    whole, each, shared, shared_each = quantity
    return whole + each * samples + (shared + shared_each * samples) / tensor
