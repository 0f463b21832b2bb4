"""A small network with every peculiarity, and steps of it."""

import threading

import torch
import torch.nn.functional as F
from torch import nn

from paceline.replica.replica import Replica


class Tied(nn.Module):
    """A tied embedding, a block that is used twice, one that may be skipped, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = nn.Linear(8, 8)
        self.optional = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, use_optional=True):
        x = self.block(torch.tanh(self.block(self.embedding(tokens))))
        if use_optional:
            x = x + self.optional(x)
        return self.head(self.frozen(x))


_SEEDING = threading.Lock()  # threads share torch's generator


def make_module(seed=0, make=Tied):
    with _SEEDING:
        torch.manual_seed(seed)
        return make()


def make_batch(num_samples=12, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (num_samples,), generator=generator), torch.randint(
        11, (num_samples,), generator=generator
    )


def make_replica(module, group=None, **options):
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    return Replica(module, optimizer, group=group, **options)


def run_one_step(replica, *, weight=12.0, use_optional=True, scale=1.0):
    inputs, targets = make_batch()
    loss = F.cross_entropy(replica(inputs, use_optional).float(), targets) * scale
    replica.backward(loss, weight=weight)
    return replica.update()
