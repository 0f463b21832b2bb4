"""A model of two inputs: who rates what. Batches are dicts, whose values the model takes by name.

    paceline train examples/two_inputs.py:run
    paceline train examples/two_inputs.py:run --workers 4 --model.arguments.width 32

Ratings are made of hidden tastes, and a little noise.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, random_split

import paceline

NUM_USERS, NUM_FILMS = 200, 100


class Ratings(Dataset[dict[str, Tensor]]):
    """Ratings of films by people."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)  # every worker makes the same ones
        self.user = torch.randint(NUM_USERS, (num_samples,), generator=generator)
        self.film = torch.randint(NUM_FILMS, (num_samples,), generator=generator)
        tastes = torch.randn(NUM_USERS + NUM_FILMS, 3, generator=generator)
        noise = torch.randn(num_samples, generator=generator)
        self.rating = (tastes[self.user] * tastes[NUM_USERS + self.film]).sum(1) + 0.1 * noise

    def __len__(self) -> int:
        return len(self.rating)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"user": self.user[index], "film": self.film[index], "labels": self.rating[index]}


class TwoTowers(nn.Module):
    """What users like, what films have, and a network over both."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(NUM_USERS, width), nn.Embedding(NUM_FILMS, width)
        self.network = nn.Sequential(nn.Linear(3 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 1))

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        likes, has = self.users(user), self.films(film)
        return self.network(torch.cat([likes, has, likes * has], dim=1)).squeeze(1)


def make_datasets(num_samples: int = 10_000) -> list[Dataset[dict[str, Tensor]]]:
    """Return ratings to train on, and a tenth held out."""
    return list(random_split(Ratings(num_samples), [0.9, 0.1]))


def compute_loss(output: Tensor, batch: paceline.Batch) -> Tensor:
    """Return the squared error, a mean over samples."""
    return nn.functional.mse_loss(output, batch.targets)


def run() -> paceline.Run:
    """Ratings by tastes."""
    return paceline.Run(
        model=TwoTowers,
        data=make_datasets,
        loss=compute_loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        global_batch=64,
        num_epochs=5,
    )
