"""The task of `bench resilience`: a model whose computing is a sleep, so that a dead worker frees no core.

It is a recipe, read by `paceline train FILE:run`, and what the worker of torchft trains too, in plain torch.
"""

import os
import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SECONDS, PARAMETERS, BATCH, STEPS, INTERVAL = (
    f"RESILIENCE_{name}" for name in ("SECONDS_PER_SAMPLE", "PARAMETERS", "BATCH", "STEPS", "CHECKPOINT_INTERVAL")
)
"""Environment variables by which the benchmark sets the task for processes of any launcher."""
_WIDTH = 256
_NUM_SAMPLES = 4096


class SleepingModel(nn.Module):
    """A perceptron whose forward takes a given time for each sample.

    Args:
        num_parameters: About this many.
        seconds_per_sample: Time that stands for computing.
    """

    def __init__(self, num_parameters: int, seconds_per_sample: float) -> None:
        super().__init__()
        depth = max(1, num_parameters // _WIDTH**2)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(depth))
        self.head = nn.Linear(_WIDTH, 2)
        self._seconds_per_sample = seconds_per_sample

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of shape ``(batch, 2)``."""
        time.sleep(self._seconds_per_sample * len(inputs))
        for layer in self.layers:
            inputs = inputs + 0.1 * torch.tanh(layer(inputs))
        return self.head(inputs)  # type: ignore[no-any-return]


def build() -> nn.Module:
    """Return the model that the environment asks for."""
    return SleepingModel(int(os.environ[PARAMETERS]), float(os.environ[SECONDS]))


def make_data() -> TensorDataset:
    """Return points and the sign of their sum, the same in each process."""
    points = torch.randn(_NUM_SAMPLES, _WIDTH, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.sum(dim=1) > 0).long())


def run() -> object:
    """Return the run that the environment asks for."""
    from paceline.training import Run  # the worker of torchft, which reads this file, needs only torch

    return Run(
        model=build,
        data=make_data,
        loss="classification",
        optimizer={"name": "adamw", "learning_rate": 1e-3},
        global_batch=int(os.environ[BATCH]),
        num_steps=int(os.environ[STEPS]),
        checkpoint_interval=int(os.environ[INTERVAL]),
        num_threads=1,
    )
