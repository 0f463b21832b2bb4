"""Tiny models that nobody here wrote, each with inputs of two samples."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 48
WIDTH = 16
TOKENS = torch.arange(16).view(2, 8)


def make_gpt2() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **dropout))


def make_llama(num_key_value_heads: int = 2) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=num_key_value_heads, max_position_embeddings=16, **sizes
    )
    return LlamaForCausalLM(config)


def make_bert() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes, **dropout))


def make_vit() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=6, **sizes))


class FusedAttention(nn.Module):
    """Queries, keys and values of one matrix; heads from an attribute."""

    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTW: Tensor) -> Tensor:
        batch, length, _ = x_BTW.shape
        joined = self.qkv(x_BTW).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*joined)
        return self.project(attended.transpose(1, 2).flatten(2))


class ShapedAttention(FusedAttention):
    """As in nanoGPT: widths from the input, so that heads cannot be shared out."""

    def forward(self, x_BTW: Tensor) -> Tensor:
        batch, length, width = x_BTW.shape
        shape = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (one.view(shape).transpose(1, 2) for one in self.qkv(x_BTW).split(WIDTH, dim=2))
        return self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = attention
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.scale = nn.LayerNorm(8)  # of some of what a rank has
        self.shrink = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTW: Tensor) -> Tensor:
        x_BTW = x_BTW + self.attention(self.norm(x_BTW))
        hidden = self.scale(self.expand(x_BTW).unflatten(-1, (-1, 8))).flatten(-2)
        shrunk = self.shrink(torch.relu(hidden))
        shrunk += x_BTW  # in place
        return shrunk


class UserModel(nn.Module):
    def __init__(self, attention: type[FusedAttention] = FusedAttention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(attention()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BTW = self.embedding(input_ids)
        for layer in self.layers:
            x_BTW = layer(x_BTW)
        return self.head(x_BTW)


class TorchModel(nn.Module):
    """Torch's own layers, one with keys and values of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.narrow = nn.Linear(WIDTH, 6)
        self.attention = nn.MultiheadAttention(WIDTH, 4, kdim=6, vdim=6)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        padding = input_ids == 15
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=self.head.weight.dtype)
        x_TBW = self.encoder(self.embedding(input_ids), mask, padding.to(mask.dtype) * -1e9).transpose(0, 1)
        narrow = self.narrow(x_TBW)
        attended, weights = self.attention(x_TBW, narrow, narrow, padding)
        return self.head((x_TBW + attended).transpose(0, 1)) + weights.sum(-1, keepdim=True)


MODELS = {
    "gpt2": make_gpt2,
    "llama": make_llama,
    "llama with one key": lambda: make_llama(1),
    "bert": make_bert,
    "vit": make_vit,
    "fused": UserModel,
    "shaped": lambda: UserModel(ShapedAttention),
    "torch": TorchModel,
}


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model in float64 and inputs of two samples, the same on every call."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    if name == "vit":
        return model, {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    return model, {"input_ids": TOKENS}


def logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits
