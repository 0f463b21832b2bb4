"""Text of different lengths: batches are padded, and the loss is a mean over what is no padding.

    paceline train examples/variable_length.py:run

Workers have different numbers of tokens. Each says how many its mean is over, so that all together learn what one
process would.
"""

import inspect
import textwrap
from pathlib import Path

import torch
from torch import Tensor, nn

import paceline

PADDING = 0


class NextByte(nn.Module):
    """A recurrent network that guesses the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens_BT))[0])


def make_datasets(max_length: int = 64) -> tuple[list[Tensor], list[Tensor]]:
    """Return the lines of a module as they are, and every tenth held out."""
    lines = [Path(inspect.__file__).read_bytes().splitlines(), Path(textwrap.__file__).read_bytes().splitlines()]
    train, held_out = ([torch.tensor(list(line[:max_length])) for line in part if len(line) > 1] for part in lines)
    return train, held_out


def pad(lines: list[Tensor]) -> Tensor:
    """Return lines of one length."""
    return nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=PADDING)


def compute_loss(model: nn.Module, batch: paceline.Batch) -> tuple[Tensor, Tensor]:
    """Return the mean over bytes that are no padding, and their number."""
    inputs_BT, targets_BT = batch.data[:, :-1], batch.data[:, 1:]
    is_text_BT = targets_BT != PADDING
    loss = nn.functional.cross_entropy(model(inputs_BT)[is_text_BT], targets_BT[is_text_BT])
    return loss, is_text_BT.sum()


def run() -> paceline.Run:
    """Lines of Python, byte by byte."""
    return paceline.Run(
        model={"name": "function", "path": NextByte, "arguments": {"width": 64}},
        data=make_datasets,
        collate_fn=pad,
        loss=compute_loss,
        optimizer={"name": "adamw", "learning_rate": 3e-3},
        global_batch=32,
        num_epochs=2,
    )
