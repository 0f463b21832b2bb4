"""Tiny models that nobody wrote for a pipeline, each with its batches."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 24
WIDTH = 16
SIZES = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}


def gpt2() -> nn.Module:
    """Tied, with learned positions beside the embedding."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(_without_ids(GPT2Config(**sizes, **dropout)))


def llama() -> nn.Module:
    """Rotary positions, made once for all layers; two heads share a key."""
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=32, **SIZES)
    return LlamaForCausalLM(_without_ids(config))


def bert() -> nn.Module:
    """Tied, with a bias of the head's own; attention in both directions."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **SIZES, **dropout)
    return BertForMaskedLM(_without_ids(config))


def vit() -> nn.Module:
    """Pictures, with a token of the class."""
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=VOCABULARY, **SIZES))


def _without_ids(config: PretrainedConfig) -> PretrainedConfig:
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return config


class Plain(nn.Module):
    """A user's own: skips over blocks, a scale and a class token of the model's, a mask, a head tied by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("slope", torch.tensor(0.1))
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.cat([self.start.expand(len(input_ids), -1, -1), self.embedding(input_ids)], 1)[:, :-1]
        mask = (input_ids > 3).unsqueeze(-1)
        skips = []
        for layer in self.down:
            x = x + torch.tanh(layer(x)) * mask
            skips.append(x)
        for layer in self.up:
            x += self.scale * layer(x * self.slope) + skips.pop()
        return torch.nn.functional.linear(self.norm(x), self.embedding.weight)


class Attention(nn.Module):
    """As in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.joint = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x_BTW: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.joint(self.norm(x_BTW)).chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x_BTW + attended.transpose(1, 2).flatten(2)


class Learned(nn.Module):
    """A user's own decoder: positions by a count, and of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(32, WIDTH)
        self.table = nn.Parameter(torch.randn(1, 32, WIDTH))
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        x = self.embedding(input_ids) + self.position(torch.arange(length)) + self.table[:, :length]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Encoder(nn.Module):
    """Torch's own layers, with the mask of a decoder, and an attention whose weights nobody asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=self.head.weight.dtype)
        x = self.encoder(self.embedding(input_ids), mask)
        return self.head(x + self.attention(x, x, x)[0])


class Mixing(Learned):
    """A model that looks at other tokens in a way of its own too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(Averaging())


class Averaging(nn.Module):
    """The mean of all tokens."""

    def forward(self, x_BTW: Tensor) -> Tensor:
        return x_BTW + x_BTW.mean(1, keepdim=True)


MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "plain": Plain,
    "learned": Learned,
    "encoder": Encoder,
    "mixing": Mixing,
}


def make(name: str) -> nn.Module:
    """Return a model, the same on every call."""
    torch.manual_seed(0)
    return MODELS[name]().double()


def make_data(name: str, step: int, num_samples: int, *, padded: bool = True) -> dict[str, Any]:
    """Return inputs and labels of a step; texts for GPT-2 and BERT are padded on the right, if `padded`."""
    generator = torch.Generator().manual_seed(step)
    if name == "vit":
        pictures = torch.randn(num_samples, 3, 8, 8, dtype=torch.float64, generator=generator)
        return {"pixel_values": pictures, "labels": torch.randint(VOCABULARY, (num_samples,), generator=generator)}
    length = 8 if step < 2 else 12
    tokens = torch.randint(VOCABULARY, (num_samples, length), generator=generator)
    labels = tokens.clone()
    data = {"input_ids": tokens}
    if padded and name in ("gpt2", "bert"):
        mask = torch.arange(length) < torch.randint(3, length, (num_samples, 1), generator=generator)
        mask[0] = True
        data["attention_mask"] = mask.long()
        labels[~mask] = -100
    return {**data, "labels": labels}
