"""A Llama of the transformers library, unchanged: rotary positions, grouped heads, RMSNorm, SwiGLU.

    paceline train examples/llama.py:run
    paceline train examples/llama.py:run --workers 4 --layout.sharded 2     # parameters shared between two ranks
    paceline export runs/llama-1 --to my-llama                              # a folder for from_pretrained

It learns Python, byte by byte. Weights are random and nothing is downloaded.
"""

import argparse
import inspect
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import paceline


def build(width: int = 64, num_layers: int = 2) -> nn.Module:
    """Return a small Llama over bytes."""
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=256, **sizes, **heads, **special))


def make_datasets(length: int = 64) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return blocks of text to train on, and others held out, as the library has them: labels are the tokens."""

    def read(module: object) -> list[dict[str, Tensor]]:
        tokens = torch.tensor(list(Path(inspect.getfile(module)).read_bytes()))  # type: ignore[arg-type]
        blocks = tokens[: len(tokens) // length * length].view(-1, length)
        return [{"input_ids": block, "labels": block} for block in blocks]

    return read(inspect), read(argparse)


def run() -> paceline.Run:
    """A Llama that learns Python."""
    return paceline.Run(
        model=build,
        data=make_datasets,
        loss="next_token",
        optimizer={"name": "adamw", "learning_rate": 2e-3},
        global_batch=16,
        num_steps=100,
        evaluate_samples=64,
    )
