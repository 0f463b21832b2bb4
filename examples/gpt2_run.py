"""GPT-2 of the transformers library, unchanged, as a run of your own.

    paceline train examples/gpt2_run.py:run
    paceline train examples/gpt2_run.py:run --num_steps 50 --model.arguments.width 64

Weights are random and nothing is downloaded.
"""

from transformers import GPT2Config, GPT2LMHeadModel

import paceline
from paceline.data.text import Text
from paceline.optim import AdamW
from paceline.schedules import Cosine
from paceline.training import NextToken


def build_gpt2(width: int = 128, num_layers: int = 4) -> GPT2LMHeadModel:
    """Return a small GPT-2 over bytes."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=128,
        n_embd=width,
        n_layer=num_layers,
        n_head=4,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def run() -> paceline.Run:
    """A GPT-2 that learns Python from the standard library's source files."""
    return paceline.Run(
        model=build_gpt2,
        data=Text(sequence_length=128, max_bytes=5_000_000),
        loss=NextToken(),
        optimizer=AdamW(learning_rate=2e-3),
        schedule=Cosine(warmup_steps=10),
        global_batch=16,
        num_steps=100,
        evaluate_samples=64,
    )
