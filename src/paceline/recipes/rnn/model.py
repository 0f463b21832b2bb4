"""A recurrent network that reads a sequence step by step and then classifies it.

Hochreiter and Schmidhuber 1997 (LSTM), Cho et al. 2014 (GRU), Jozefowicz et al. 2015 (an LSTM forgets little at first).

Shapes: B batch, T steps of the sequence, F features of a step, W width.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from paceline.data.base import Spec
from paceline.errors import SettingsError
from paceline.registry import register
from paceline.training.model import Model


@register("rnn")
class RNN(Model):
    """Settings of a recurrent classifier of sequences, of shape (steps, features).

    An image (channels, height, width) is read row by row: each is a step whose features are the row's pixels.
    """

    cell: Literal["lstm", "gru"] = "lstm"
    """Recurrent cell: lstm has a memory beside its output, gru (3/4 of the size) has none."""
    width: int = Field(128, ge=1)
    """Dims of a layer's hidden state."""
    num_layers: int = Field(1, ge=1)
    """Number of layers, each of which reads the outputs of the one before."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability between layers, and before the classes."""

    def build(self, spec: Spec) -> "RecurrentClassifier":
        """Return a new network.

        Raises:
            SettingsError: The data's samples are neither sequences of vectors nor images.
        """
        if len(spec.input_shape) not in (2, 3):
            raise SettingsError(
                "samples for model rnn must have 2 dims (steps, features) or 3 (channels, height, width), but got the "
                f"shape {spec.input_shape}; choose other data or another model"
            )
        num_features = spec.input_shape[-1] * (spec.input_shape[0] if len(spec.input_shape) == 3 else 1)
        return RecurrentClassifier(self, num_features, spec.num_classes)


class RecurrentClassifier(nn.Module):
    """Sequences to the logits of their classes, from the last layer's output at the last step."""

    def __init__(self, settings: RNN, num_features: int, num_classes: int):
        super().__init__()
        cell = nn.LSTM if settings.cell == "lstm" else nn.GRU
        between_layers = settings.dropout if settings.num_layers > 1 else 0.0
        self.recurrent = cell(
            num_features, settings.width, settings.num_layers, batch_first=True, dropout=between_layers
        )
        self.dropout = nn.Dropout(settings.dropout)
        self.head = nn.Linear(settings.width, num_classes)
        if settings.cell == "lstm":
            self._start_by_remembering(settings)

    def _start_by_remembering(self, settings: RNN) -> None:
        forget_gate = slice(settings.width, 2 * settings.width)  # torch's order: input, forget, cell, output
        with torch.no_grad():
            for number in range(settings.num_layers):
                self.recurrent.get_parameter(f"bias_ih_l{number}")[forget_gate] += 1

    def forward(self, sequences: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for sequences_BTF, or for images read row by row."""
        if sequences.dim() == 4:
            sequences = sequences.transpose(1, 2).flatten(2)
        said_BTW, _ = self.recurrent(sequences)
        logits: Tensor = self.head(self.dropout(said_BTW[:, -1]))
        return logits
