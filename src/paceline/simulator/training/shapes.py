"""Shapes of models that are priced in closed form: the contract and the Transformers."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from paceline.registry import Family, register
from paceline.simulator.training.operators import Kind, Operators, Workload, WorkSlice

Count = Annotated[int, Field(ge=1)]
OWN_STACK = "paceline"
"""Software of steps of our own."""


class ModelShape(Family):
    """Shape of a model: enough to count its operators, parameters and activations."""

    family = "model"

    @property
    def reads_tokens(self) -> bool:
        """Whether a sample is a sequence of tokens; else it is an image."""
        return True

    @property
    def fixed(self) -> dict[str, Any]:
        """Fields of a row that the shape has settled, by name: no row may say otherwise."""
        return {}

    @property
    def uncertain(self) -> tuple[str, ...]:
        """What of it could not be counted, for the list of what was assumed."""
        return ()

    @property
    def likeness(self) -> str:
        """Name of the kind of model whose steps are like its own."""
        return self.name

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of blocks that a pipeline can be cut between."""

    @property
    def attends(self) -> bool:
        """Whether it has attention, which context ranks can share."""
        return self.reads_tokens

    @property
    def divided(self) -> Mapping[str, int] | None:
        """Numbers of things that tensor ranks divide evenly, by what they are; None if they cannot share it."""
        return None

    @abstractmethod
    def count(self, part: WorkSlice, image: tuple[int, ...]) -> Workload:
        """Return what it does with one micro-batch on one rank."""


class _Transformer(ModelShape):
    num_layers: Count
    """Number of layers."""
    width: Count
    """Elements of each token's vector."""
    num_heads: Count | None = None
    """Attention heads; None: of 128 elements each."""
    num_kv_heads: Count | None = None
    """Heads of keys and values; None: as many as of queries."""
    feedforward: Count | None = None
    """Width inside the feed-forward part; None: four times `width`."""
    is_gated: bool | None = None
    """Whether a second matrix gates it (SwiGLU); None: no."""
    vocabulary: Count | None = None
    """Number of different tokens; None: 50,304."""
    is_tied: bool | None = None
    """Whether head and embedding are one matrix; None: yes."""
    positions: Literal["learned", "rotary", "alibi", "none"] | None = None
    """Form in which the place of a token enters; None: learned."""

    is_causal: ClassVar[bool] = True
    scored_share: ClassVar[float] = 1.0
    """Share of tokens whose words are scored."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.num_heads and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads = {self.num_kv_heads}, but got {self.num_heads}; "
                "change one"
            )
        return self

    @property
    def num_blocks(self) -> int:
        """Its layers."""
        return self.num_layers

    @property
    def heads(self) -> int:
        """Attention heads, assumed if not known."""
        return self.num_heads or max(1, round(self.width / 128))

    @property
    def divided(self) -> dict[str, int]:
        """Its heads, and the outputs of its matrices."""
        kv_heads = self.num_kv_heads or self.heads
        return {
            "num_heads": self.heads, "num_kv_heads": kv_heads, "feedforward": self.inner, "vocabulary": self.words
        }  # fmt: skip

    @property
    def kv_width(self) -> float:
        """Elements of a token's keys."""
        return self.width * (self.num_kv_heads or self.heads) / self.heads

    @property
    def inner(self) -> int:
        """Width of the feed-forward part."""
        return self.feedforward or 4 * self.width

    @property
    def words(self) -> int:
        """Vocabulary, as padded to a multiple of 128 by who trains at speed."""
        return -(-(self.vocabulary or 50_304) // 128) * 128

    @property
    def layer_parameters(self) -> float:
        """Parameters of the matrices of one layer."""
        return self.width * (2 * self.width + 2 * self.kv_width + self.inner * (3 if self.is_gated else 2))

    def count(self, part: WorkSlice, image: tuple[int, ...]) -> Workload:
        """Return the operators of Vaswani et al. 2017 with later variants: grouped heads, gates, fused attention."""
        tokens, width, split = part.samples * part.tokens, self.width, part.tensor
        between = split if part.is_split else 1
        head = Operators()
        scored = tokens * self.scored_share
        head.add_weight(Kind.MATRIX, scored, self.words / split, width, element_bytes=part.element_bytes, forward=1.0)
        # Scores are written, widened to 4 bytes, normalised and turned into gradients.
        head.add_bytes(Kind.LOSS, scored * self.words / split * (2 * part.element_bytes + 20))
        head.add_bytes(Kind.POINTWISE, 6 * tokens * width / between * part.element_bytes)
        elements = tokens * width
        state = tokens * (width / between * 10 + (width + self.kv_width) / split * 5 + self._inner_kept() / split)
        scores = 0.0 if part.is_fused else self._score_elements(part) * (2 * part.element_bytes + 1)
        return Workload(
            blocks=self._count_layers(part),
            head=head,
            block_parameters=self.num_layers * (self.layer_parameters / split + 4 * width),
            embedding_parameters=self.words * width / split,
            head_parameters=0.0 if self.is_tied is not False else self.words * width / split,
            boundary_elements=elements,
            block_reductions=4.0 * self.num_layers,
            context_elements=2 * tokens * self.kv_width / split * self.num_layers,
            kernels=self.num_layers * (60.0 if part.is_fused else 80.0) * (1 + part.recomputed / 3),
            kept_bytes=self.num_layers * (state * part.element_bytes + scores),
            kept_scores_bytes=self.num_layers * scores,
            kept_inputs_bytes=self.num_layers * elements / between * part.element_bytes,
            head_bytes=scored * self.words / split * (part.element_bytes + 10),
        )

    def _inner_kept(self) -> float:
        return self.inner * (4.0 if self.is_gated else 2.0)

    def _score_elements(self, part: WorkSlice) -> float:
        return part.samples * self.heads / part.tensor * part.tokens * part.sequence

    def _count_layers(self, part: WorkSlice) -> Operators:
        """Return the operators of all layers."""
        layers = Operators()
        tokens, width, split, inner = part.samples * part.tokens, self.width, part.tensor, self.inner
        forward = 1.0 + part.recomputed
        for columns, depth in (
            ((width + 2 * self.kv_width) / split, width),
            (width, width / split),
            (inner * (2 if self.is_gated else 1) / split, width),
            (width, inner / split),
        ):
            layers.add_weight(
                Kind.MATRIX, tokens, columns, depth, element_bytes=part.weight_bytes, forward=forward,
                count=self.num_layers,
            )  # fmt: skip
            if part.weight_bytes < part.element_bytes:  # each operand is read, scaled and written narrower
                operands = tokens * (columns + depth) + depth * columns
                layers.add_bytes(
                    Kind.POINTWISE, operands * (part.element_bytes + 2 * part.weight_bytes), self.num_layers
                )
        self._count_attention(layers, part)
        between = split if part.is_split else 1
        outside = 2 * 2 + 2 * 3.5  # two norms; two residuals with bias and dropout
        inside = (width + 2 * self.kv_width) * (4 if self.positions == "rotary" else 2) + inner * (
            3 if self.is_gated else 2
        )
        moved = tokens * (outside * width / between + inside / split) * part.element_bytes
        layers.add_bytes(Kind.POINTWISE, moved, self.num_layers * (3.0 + part.recomputed_bytes))
        return layers

    def _count_attention(self, layers: Operators, part: WorkSlice) -> None:
        """Add the products of queries with keys, and of scores with values."""
        heads, depth = self.heads / part.tensor, self.width / self.heads
        flops = 2 * 2 * part.samples * heads * part.tokens * part.sequence * depth
        again = 1.0 if part.recomputes_attention else 0.0
        if part.is_fused:  # backward computes the scores anew: five products for forward's two
            layers.add_product(
                Kind.FUSED, part.tokens, part.sequence, depth, element_bytes=0.0, batch=part.samples * heads,
                count=self.num_layers * (1.0 + again + 2.5), flops=flops * (0.5 if self.is_causal else 1.0),
            )  # fmt: skip
            return
        for rows, columns, inner in (
            (part.tokens, part.sequence, depth),
            (part.tokens, depth, part.sequence),
        ):
            layers.add_product(
                Kind.BATCHED, rows, columns, inner, element_bytes=part.element_bytes, batch=part.samples * heads,
                count=self.num_layers * (3.0 + again),
            )  # fmt: skip
        scores = self._score_elements(part)  # softmax and dropout; with their backward about 1.3 times that
        layers.add_bytes(Kind.POINTWISE, scores * 4.5 * part.element_bytes, self.num_layers * (2.3 + again))


@register("decoder")
class DecoderShape(_Transformer):
    """A decoder-only Transformer."""


@register("bert")
class BertShape(_Transformer):
    """A Transformer encoder that guesses masked words; a loss over all its scores is taken of the masked alone."""

    is_causal: ClassVar[bool] = False
    scored_share: ClassVar[float] = 0.16
