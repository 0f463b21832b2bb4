"""Data and a model of your own, as a run: points on two spirals, told apart by a small network.

paceline train examples/mine.py:run
paceline train examples/mine.py:run --data.noise 0.3 --model.arguments.width 128
"""

import math

import torch
from pydantic import Field
from torch import Tensor, nn

import paceline
from paceline.data import Source, Spec, Splits
from paceline.data.base import Indices
from paceline.optim import AdamW
from paceline.training import Classification


@paceline.register("spirals")
class Spirals(paceline.Data):
    """Points of two spirals; the class of a point is its spiral."""

    num_samples: int = Field(default=4000, ge=10)
    """Points in all; a tenth is held out."""
    noise: float = Field(default=0.1, ge=0)
    """Standard deviation of what is added to each coordinate."""

    def open(self) -> Splits:
        """Make the points: the same ones on every worker, whatever was drawn before."""
        generator = torch.Generator().manual_seed(0)
        labels_N = torch.arange(self.num_samples) % 2
        angle_N = torch.rand(self.num_samples, generator=generator) * 3 * math.pi
        turned_N = angle_N + labels_N * math.pi
        points_N2 = torch.stack([turned_N.cos(), turned_N.sin()], dim=1) * angle_N[:, None] / math.pi
        points_N2 += self.noise * torch.randn(self.num_samples, 2, generator=generator)
        cut = self.num_samples // 10
        return Splits(train=Points(points_N2[cut:], labels_N[cut:]), held_out=Points(points_N2[:cut], labels_N[:cut]))


class Points(Source):
    """Points and their classes, in memory."""

    def __init__(self, points_N2: Tensor, labels_N: Tensor) -> None:
        self.spec = Spec(num_classes=2, input_shape=(2,))
        self._points_N2 = points_N2
        self._labels_N = labels_N

    def __len__(self) -> int:
        return len(self._labels_N)

    def read(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return the points and classes at `indices`, stacked."""
        return self._points_N2[indices], self._labels_N[indices]


def build(width: int = 64) -> nn.Module:
    """Return any module; nothing in it need know of Paceline."""
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def run() -> paceline.Run:
    """Two spirals."""
    return paceline.Run(
        model=build,
        data=Spirals(),
        loss=Classification(),
        optimizer=AdamW(learning_rate=1e-2, weight_decay=0.0),
        global_batch=64,
        num_steps=400,
    )
