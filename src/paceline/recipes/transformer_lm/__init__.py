"""Layer 10: a decoder-only Transformer that learns to write text, byte by byte."""

from paceline.data.text import Text
from paceline.optim import AdamW
from paceline.recipes.transformer_lm.model import TransformerLM
from paceline.recipes.transformer_lm.sizes import (
    TransformerLM1B,
    TransformerLM124M,
    TransformerLM350M,
    TransformerLM760M,
)
from paceline.schedules import Cosine
from paceline.training.objective import NextToken
from paceline.training.run import Run

__all__ = [
    "TransformerLM",
    "TransformerLM1B",
    "TransformerLM124M",
    "TransformerLM350M",
    "TransformerLM760M",
    "run",
]


def run() -> Run:
    """A byte-level language model; by default it trains on the source files of Python's standard library.

    Any text will do: `--data.path my/texts` takes a file, a folder, or a memory-mapped token file.
    Larger models by name: `--model transformer_lm_124m`, `_350m`, `_760m` and `_1b`.
    """
    return Run(
        model=TransformerLM(width=128, num_layers=4, num_heads=4),
        data=Text(sequence_length=128),
        loss=NextToken(),
        optimizer=AdamW(learning_rate=2e-3),
        schedule=Cosine(warmup_steps=60),
        global_batch=8,
        num_steps=1200,
        evaluate_interval=200,
        evaluate_samples=256,
        checkpoint_interval=300,
    )
