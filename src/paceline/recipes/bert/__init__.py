"""Layer 10: a bidirectional Transformer that learns to predict masked bytes of a text."""

from paceline.data.masked_text import MaskedText
from paceline.optim import AdamW
from paceline.recipes.bert.model import Bert, BertBase, BertLarge
from paceline.schedules import Cosine
from paceline.training.objective import MaskedLM
from paceline.training.run import Run

__all__ = ["Bert", "BertBase", "BertLarge", "run"]


def run() -> Run:
    """A masked language model of bytes; by default it trains on the source files of Python's standard library.

    Any text will do: `--data.path my/texts` takes a file, a folder, or a memory-mapped token file. The models of the
    paper are `--model bert_base` and `--model bert_large`.
    """
    return Run(
        model=Bert(width=128, num_layers=4, num_heads=4, dropout=0.0),
        data=MaskedText(sequence_length=64),
        loss=MaskedLM(),
        optimizer=AdamW(learning_rate=2e-3),
        schedule=Cosine(warmup_steps=60),
        global_batch=32,
        num_steps=1200,
        evaluate_interval=200,
        evaluate_samples=256,
        checkpoint_interval=300,
    )
