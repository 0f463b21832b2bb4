"""The transformer in the sizes of Brown et al. 2020, as variants of `TransformerLM` with other defaults.

Each is named after its number of parameters with GPT-2's vocabulary of 50,257 tokens. With bytes these are fewer: 85,
302, 680 and 907 million. Any field can be set too, as in ``--model transformer_lm_350m --model.num_layers 12``.
"""

from pydantic import Field

from paceline.recipes.transformer_lm.model import TransformerLM
from paceline.registry import register


@register("transformer_lm_124m")
class TransformerLM124M(TransformerLM):
    """123.6 million parameters, in the shape of the smallest GPT-2 (Radford et al. 2019) and GPT-3."""

    width: int = Field(768, ge=2)
    """Dims of a token's vector."""
    num_layers: int = Field(12, ge=1)
    """Number of layers, each with attention and an MLP."""
    num_heads: int = Field(12, ge=1)
    """Number of attention heads, among which `width` is divided."""


@register("transformer_lm_350m")
class TransformerLM350M(TransformerLM):
    """353.3 million parameters, in the shape of GPT-3 Medium."""

    width: int = Field(1024, ge=2)
    """Dims of a token's vector."""
    num_layers: int = Field(24, ge=1)
    """Number of layers, each with attention and an MLP."""
    num_heads: int = Field(16, ge=1)
    """Number of attention heads, among which `width` is divided."""


@register("transformer_lm_760m")
class TransformerLM760M(TransformerLM):
    """756.7 million parameters, in the shape of GPT-3 Large."""

    width: int = Field(1536, ge=2)
    """Dims of a token's vector."""
    num_layers: int = Field(24, ge=1)
    """Number of layers, each with attention and an MLP."""
    num_heads: int = Field(16, ge=1)
    """Number of attention heads, among which `width` is divided."""


@register("transformer_lm_1b")
class TransformerLM1B(TransformerLM):
    """1,009.3 million parameters, as wide as GPT-3 XL with 18 of its 24 layers."""

    width: int = Field(2048, ge=2)
    """Dims of a token's vector."""
    num_layers: int = Field(18, ge=1)
    """Number of layers, each with attention and an MLP."""
    num_heads: int = Field(16, ge=1)
    """Number of attention heads, among which `width` is divided."""
