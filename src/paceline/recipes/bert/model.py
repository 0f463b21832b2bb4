"""A bidirectional transformer that predicts masked tokens.

Devlin et al. 2019: post-norm layers with biases, learned positions, GELU, and one matrix for input and output tokens.
Left out, as by Liu et al. 2019: the next-sentence task, and with it segment vectors and the pooler. Positions start as
sinusoids (Vaswani et al. 2017) and not as noise: from noise a small model predicts by frequency alone for a long time,
until it has learned which tokens are neighbours.

Shapes: B batch, T tokens, V vocabulary, W width, H heads, D dims of a head.
"""

import math
from typing import Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.parallel.context import ContextParallelModule
from paceline.parallel.pipeline import PipelineLayer
from paceline.parallel.tensor import TiedHead, register_styles
from paceline.registry import register
from paceline.training.model import Model

INITIAL_STD = 0.02
"""Standard deviation of matrices in a model of `PAPER_WIDTH`, truncated at twice that; it falls with the root of the
width."""
PAPER_WIDTH = 768
SLOWEST_WAVELENGTH = 10_000.0
"""Slowest wavelength of the positions' sinusoids, in tokens, over 2 pi."""
NORM_EPSILON = 1e-12


@register("bert")
class Bert(Model):
    """Settings of a bidirectional transformer over the tokens of a masked text."""

    width: int = Field(256, ge=2)
    """Dims of a token's vector."""
    num_layers: int = Field(6, ge=1)
    num_heads: int = Field(4, ge=1)
    feedforward_multiple: int = Field(4, ge=1)
    """Hidden dims of a layer's MLP, as a multiple of `width`."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout probability of the embedding and of each attention's and MLP's output; attention weights have none, since
    torch's fused kernel could not be used."""

    @model_validator(mode="after")
    def _must_divide(self) -> Self:
        head_dim, rest = divmod(self.width, self.num_heads)
        if rest:
            raise SettingsError(
                f"width must be a multiple of num_heads, but got {self.width} = {self.num_heads} * "
                f"{head_dim} + {rest}; choose width {self.num_heads * (head_dim + 1)} or another num_heads"
            )
        return self

    def build(self, spec: Spec) -> "BidirectionalTransformer":
        """Return a new transformer for as many tokens as the data's samples have, or fewer.

        Raises:
            SettingsError: The data's samples are no rows of tokens.
        """
        if len(spec.input_shape) != 1:
            raise SettingsError(
                "samples for model bert must have 1 dim (tokens), but got the shape "
                f"{spec.input_shape}; choose data masked_text or another model"
            )
        return BidirectionalTransformer(self, vocab_size=spec.num_classes, num_positions=spec.input_shape[0])


@register("bert_base")
class BertBase(Bert):
    """The smaller model of the paper: 110 million parameters with its vocabulary of 30,522."""

    width: int = Field(768, ge=2)
    num_layers: int = Field(12, ge=1)
    num_heads: int = Field(12, ge=1)


@register("bert_large")
class BertLarge(Bert):
    """The larger model of the paper: 335 million parameters with its vocabulary of 30,522."""

    width: int = Field(1024, ge=2)
    num_layers: int = Field(24, ge=1)
    num_heads: int = Field(16, ge=1)


class BidirectionalTransformer(ContextParallelModule):
    """Tokens, some of them masked, to logits of the original token at each place."""

    def __init__(self, settings: Bert, vocab_size: int, num_positions: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, settings.width)
        self.positions = nn.Embedding(num_positions, settings.width)
        self.embedding_norm = _norm(settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.layers = nn.ModuleList(BertLayer(settings) for _ in range(settings.num_layers))
        self.transform = nn.Linear(settings.width, settings.width)
        self.transform_norm = _norm(settings.width)
        self.head = TiedHead(nn.Parameter(torch.zeros(vocab_size)))
        self._initialise()

    def _initialise(self) -> None:
        width = self.embedding.embedding_dim
        std = INITIAL_STD * math.sqrt(PAPER_WIDTH / width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        with torch.no_grad():
            self.positions.weight.copy_(std * math.sqrt(2) * sinusoids(self.positions.num_embeddings, width))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits_BTV; those of each place depend on all tokens."""
        x_BTW = self._embed(tokens_BT)
        for layer in self.layers:
            x_BTW = layer(x_BTW)
        return self._guess(x_BTW)

    def pipeline_layers(self) -> list[PipelineLayer]:
        """Return the layers that a pipeline can split the model into: embedding, layers, head."""
        return [
            PipelineLayer("embedding", ("embedding", "positions", "embedding_norm"), self._embed),
            *(PipelineLayer.child(self, f"layers.{i}") for i in range(len(self.layers))),
            PipelineLayer("head", ("transform", "transform_norm", "head", "embedding"), self._guess),
        ]

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        position_T = self.context.positions(tokens_BT.shape[1], tokens_BT.device)
        x_BTW: Tensor = self.dropout(self.embedding_norm(self.embedding(tokens_BT) + self.positions(position_T)))
        return x_BTW

    def _guess(self, x_BTW: Tensor) -> Tensor:
        x_BTW = self.transform_norm(F.gelu(self.transform(x_BTW)))
        logits_BTV: Tensor = self.head(x_BTW, self.embedding.weight)
        return logits_BTV


class BertLayer(nn.Module):
    """Attention, then an MLP, each added to its input, and the sum normalised."""

    def __init__(self, settings: Bert):
        super().__init__()
        self.attention = BertAttention(settings.width, settings.num_heads)
        self.attention_norm = _norm(settings.width)
        self.mlp = BertMLP(settings.width, settings.width * settings.feedforward_multiple)
        self.mlp_norm = _norm(settings.width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return x_BTW plus the outputs of attention and MLP, normalised."""
        x_BTW = self.attention_norm(x_BTW + self.dropout(self.attention(x_BTW)))
        mapped_BTW: Tensor = self.mlp_norm(x_BTW + self.dropout(self.mlp(x_BTW)))
        return mapped_BTW


class BertAttention(ContextParallelModule):
    """Attention of several heads in both directions, one matrix for queries, keys and values.

    Its rows are ordered by head (query, key, value of the first, then of the next), so that a split into blocks of
    rows keeps heads whole.
    """

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = width // num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return the attention of each token over all tokens."""
        heads_BTH3D = self.query_key_value(x_BTW).unflatten(-1, (-1, 3, self.head_dim))
        query_BHTD, key_BHTD, value_BHTD = heads_BTH3D.permute(3, 0, 2, 1, 4).unbind(0)
        mixed_BHTD = self.context.attend(query_BHTD, key_BHTD, value_BHTD, is_causal=False)
        projected_BTW: Tensor = self.project(mixed_BHTD.transpose(1, 2).flatten(-2))
        return projected_BTW


class BertMLP(nn.Module):
    """Two linear maps around GELU (Hendrycks and Gimpel 2016)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.project = nn.Linear(hidden, width)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return x_BTW mapped token by token."""
        mapped_BTW: Tensor = self.project(F.gelu(self.expand(x_BTW)))
        return mapped_BTW


def sinusoids(num_positions: int, width: int) -> Tensor:
    """Return waves of falling frequency over the positions, of shape (T, W): sines, then cosines."""
    position_T = torch.arange(num_positions, dtype=torch.float32)
    num_sines = -(-width // 2)
    exponent = torch.arange(num_sines, dtype=torch.float32) / num_sines
    angle = position_T[:, None] * SLOWEST_WAVELENGTH**-exponent
    return torch.cat([angle.sin(), angle.cos()], dim=1)[:, :width]


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=NORM_EPSILON)


register_styles(
    BidirectionalTransformer,
    {
        "embedding": "vocabulary",
        "positions": "cut",
        "embedding_norm": "sequence",
        "transform": "sequence",
        "transform_norm": "sequence",
    },
)
register_styles(
    BertLayer, {"attention": "gather", "attention_norm": "sequence", "mlp": "gather", "mlp_norm": "sequence"}
)
register_styles(
    BertAttention,
    {"query_key_value": "columns", "project": "rows"},
    counts=lambda attention: {"num_heads": attention.num_heads},
)
register_styles(BertMLP, {"expand": "columns", "project": "rows"})
