"""A decoder-only transformer: pre-norm, rotary positions, no biases, one matrix for input and output tokens.

Vaswani et al. 2017 (attention), Radford et al. 2019 (pre-norm, initialisation), Su et al. 2021 (rotary
positions), Press and Wolf 2017 (tied embedding). LayerNorm without bias replaces the more common RMSNorm: on
CPUs torch has a fused backward pass for it, which makes forward and backward four times as fast.

Shapes: B batch, T tokens, V vocabulary, W width, H heads, D dims of a head.
"""

import math
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.parallel.context import ContextParallelModule
from paceline.parallel.mixture_of_experts import MixtureOfExperts
from paceline.parallel.pipeline import PipelineLayer
from paceline.parallel.tensor import TiedHead, register_styles
from paceline.registry import register
from paceline.training.model import LayerStack, Model, UnitWidth

INITIAL_STD = 0.02
BRANCH_ENDS = ("attention.project.weight", "mlp.project.weight", "mlp.experts.project")
"""Endings of the names of each branch's last parameters."""
HIDDEN_STEP = 8
"""Factor of the hidden dims, for the sake of vector units."""


@register("transformer_lm")
class TransformerLM(Model):
    """Settings of a decoder-only transformer over the tokens of a text."""

    takes_documents: ClassVar[bool] = True

    width: int = Field(256, ge=2)
    """Dims of a token's vector."""
    num_layers: int = Field(6, ge=1)
    """Number of layers, each with attention and an MLP."""
    num_heads: int = Field(4, ge=1)
    """Number of attention heads, among which `width` is divided."""
    feedforward_multiple: float = Field(4.0, gt=0)
    """Size of a layer's MLP: the same number of parameters as two matrices around hidden dims of this multiple of
    `width`. It has three matrices, with two thirds of these hidden dims."""
    num_experts: int = Field(0, ge=0)
    """Number of experts in the place of each layer's MLP, each of its size; 0 for the MLP itself."""
    experts_per_token: int = Field(2, ge=1)
    """Number of experts that each token uses."""
    capacity_factor: float | None = Field(None, gt=0)
    """Most tokens of a sequence that an expert takes in training, as a multiple of its even share; others are dropped.
    None for all."""
    balance: float = Field(0.01, ge=0)
    """Factor of the loss that balances the use of experts."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability of the embedding and of each attention's and MLP's output; attention weights have none, since
    torch's fused kernel could not be used."""
    rotary_base: float = Field(10000.0, gt=1)
    """Slowest wavelength of the positions, in tokens, over 2 pi."""

    @model_validator(mode="after")
    def _must_divide(self) -> Self:
        head_dim, rest = divmod(self.width, self.num_heads)
        if rest:
            raise SettingsError(
                f"width must be a multiple of num_heads, but got {self.width} = {self.num_heads} * "
                f"{head_dim} + {rest}; choose width {self.num_heads * (head_dim + 1)} or another num_heads"
            )
        if head_dim % 2:
            raise SettingsError(
                f"width / num_heads must be even (rotary positions turn pairs), but got {self.width} / "
                f"{self.num_heads} = {head_dim}; choose width {self.num_heads * (head_dim + 1)} or another "
                "num_heads"
            )
        if self.num_experts and self.experts_per_token > self.num_experts:
            raise SettingsError(
                f"experts_per_token must be at most num_experts({self.num_experts}), but got {self.experts_per_token}; "
                "choose fewer"
            )
        return self

    def build(self, spec: Spec) -> "Transformer":
        """Return a new transformer with a vocabulary of ``spec.num_classes``, for any number of tokens."""
        return Transformer(self, vocab_size=spec.num_classes)

    @property
    def layer_stack(self) -> LayerStack:
        """Layers of the model, each of two branches."""
        return LayerStack(self.num_layers, "layers", BRANCH_ENDS)

    def with_depth(self, num_layers: int) -> Self:
        """Return the same settings for another number of layers."""
        return self.model_copy(update={"num_layers": num_layers})

    @property
    def unit_width(self) -> UnitWidth | None:
        """Width of a token's vector; the tied head reads copies of units without dividing. None with experts."""
        return None if self.num_experts else UnitWidth(self.width, ("norm.weight",))

    def with_width(self, width: int) -> Self:
        """Return the same settings for a multiple of the width: with more heads, each of as many dims."""
        return self.model_copy(update={"width": width, "num_heads": self.num_heads * width // self.width})


class Transformer(ContextParallelModule):
    """Tokens to the logits of the token after each."""

    def __init__(self, settings: TransformerLM, vocab_size: int):
        super().__init__()
        self.head_dim = settings.width // settings.num_heads
        self.rotary_base = settings.rotary_base
        self.embedding = nn.Embedding(vocab_size, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.layers = nn.ModuleList(DecoderLayer(settings) for _ in range(settings.num_layers))
        self.norm = nn.LayerNorm(settings.width, bias=False)
        self.head = TiedHead()
        self._initialise()

    def _initialise(self) -> None:
        # The layers' sum in the residual stream grows with their number, unless each starts smaller.
        num_branches = 2 * len(self.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                std = INITIAL_STD / math.sqrt(num_branches) if name.endswith(BRANCH_ENDS) else INITIAL_STD
                nn.init.normal_(parameter, std=std)

    def forward(
        self, tokens_BT: Tensor, documents_BT: Tensor | None = None, positions_BT: Tensor | None = None
    ) -> Tensor:
        """Return logits_BTV; those at t depend on tokens up to t only.

        Args:
            tokens_BT: Tokens.
            documents_BT: Number of the document of each token, where several share a row: none sees another.
            positions_BT: Position of each token in its document; by default in its row.
        """
        # Computed anew each time: 1/1000 of a step, and nothing to save, move between devices or outgrow.
        if positions_BT is None:
            position_T = self.context.positions(tokens_BT.shape[1], tokens_BT.device)
            rotary = rotary_tables(position_T, self.head_dim, self.rotary_base)
        else:
            rotary = rotary_tables(positions_BT[:, None], self.head_dim, self.rotary_base)
        x_BTW = self._embed(tokens_BT)
        for layer in self.layers:
            x_BTW = layer(x_BTW, rotary) if documents_BT is None else layer(x_BTW, rotary, documents_BT)
        return self._finish(x_BTW)

    def pipeline_layers(self) -> list[PipelineLayer]:
        """Return the layers that a pipeline can split the model into: embedding, layers, head."""
        return [
            PipelineLayer("embedding", ("embedding",), self._embed),
            *(PipelineLayer.child(self, f"layers.{i}") for i in range(len(self.layers))),
            PipelineLayer("head", ("norm", "head", "embedding"), self._finish),
        ]

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        x_BTW: Tensor = self.dropout(self.embedding(tokens_BT))
        return x_BTW

    def _finish(self, x_BTW: Tensor) -> Tensor:
        logits_BTV: Tensor = self.head(self.norm(x_BTW), self.embedding.weight)
        return logits_BTV


class DecoderLayer(nn.Module):
    """Attention, then an MLP or experts, each added to the stream it reads through a norm."""

    def __init__(self, settings: TransformerLM):
        super().__init__()
        self.attention_norm = nn.LayerNorm(settings.width, bias=False)
        self.attention = CausalAttention(settings.width, settings.num_heads, settings.rotary_base)
        self.mlp_norm = nn.LayerNorm(settings.width, bias=False)
        self.mlp: nn.Module = GatedMLP(settings.width, settings.feedforward_multiple)
        if settings.num_experts:
            self.mlp = MixtureOfExperts(
                settings.width,
                settings.num_experts,
                hidden=count_hidden(settings.width, settings.feedforward_multiple),
                top_k=settings.experts_per_token,
                capacity_factor=settings.capacity_factor,
                balance=settings.balance,
            )
        self.dropout = nn.Dropout(settings.dropout)

    def forward(
        self, x_BTW: Tensor, rotary: tuple[Tensor, Tensor] | None = None, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Return x_BTW plus the outputs of attention and MLP; missing tables are computed."""
        x_BTW = x_BTW + self.dropout(self.attention(self.attention_norm(x_BTW), rotary, documents_BT=documents_BT))
        mapped_BTW: Tensor = self.dropout(self.mlp(self.mlp_norm(x_BTW)))
        return x_BTW + mapped_BTW


class CausalAttention(ContextParallelModule):
    """Causal attention of several heads, one matrix for queries, keys and values.

    Its rows are ordered by head (query, key, value of the first, then of the next), so that a split into blocks of
    rows keeps heads whole.
    """

    def __init__(self, width: int, num_heads: int, rotary_base: float):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = width // num_heads
        self.rotary_base = rotary_base
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(
        self, x_BTW: Tensor, rotary: tuple[Tensor, Tensor] | None = None, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Return the attention of each token over itself and those before it, of its document if there are several.

        Missing tables are computed.
        """
        if rotary is None:
            position_T = self.context.positions(x_BTW.shape[1], x_BTW.device)
            rotary = rotary_tables(position_T, self.head_dim, self.rotary_base)
        heads_BTH3D = self.query_key_value(x_BTW).unflatten(-1, (-1, 3, self.head_dim))
        query_BHTD, key_BHTD, value_BHTD = heads_BTH3D.permute(3, 0, 2, 1, 4).unbind(0)
        query_BHTD, key_BHTD = rotate(query_BHTD, rotary), rotate(key_BHTD, rotary)
        mixed_BHTD = self.context.attend(query_BHTD, key_BHTD, value_BHTD, is_causal=True, documents_BT=documents_BT)
        projected_BTW: Tensor = self.project(mixed_BHTD.transpose(1, 2).flatten(-2))
        return projected_BTW


class GatedMLP(nn.Module):
    """Three linear maps around a gate: SwiGLU (Shazeer 2020)."""

    def __init__(self, width: int, multiple: float):
        super().__init__()
        hidden = count_hidden(width, multiple)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.expand = nn.Linear(width, hidden, bias=False)
        self.project = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return x_BTW mapped token by token."""
        mapped_BTW: Tensor = self.project(F.silu(self.gate(x_BTW)) * self.expand(x_BTW))
        return mapped_BTW


def count_hidden(width: int, multiple: float) -> int:
    """Return the hidden dims of a gated MLP with the parameters of two matrices around `multiple` times `width`."""
    return HIDDEN_STEP * max(1, round(width * multiple * 2 / 3 / HIDDEN_STEP))


def rotary_tables(position_T: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position's angles, float32, each of shape (..., T, D / 2)."""
    exponent_D = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_T.device) / head_dim
    angle_TD = position_T.float()[..., None] * base**-exponent_D
    return angle_TD.cos(), angle_TD.sin()


def rotate(x_BHTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Return the vectors rotated by their position's angles, dim i together with dim i + D / 2.

    The product of two rotated vectors depends on their distance, not on their positions.
    """
    cosine, sine = rotary
    first, second = x_BHTD.chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(x_BHTD.dtype)  # under autocast the tables are float32 and the vectors bfloat16


register_styles(Transformer, {"embedding": "vocabulary", "norm": "sequence"})
register_styles(
    DecoderLayer, {"attention_norm": "sequence", "attention": "gather", "mlp_norm": "sequence", "mlp": "gather"}
)
register_styles(
    CausalAttention,
    {"query_key_value": "columns", "project": "rows"},
    counts=lambda attention: {"num_heads": attention.num_heads},
)
register_styles(GatedMLP, {"gate": "columns", "expand": "columns", "project": "rows"})
