"""A small module of all kinds of parameters, and steps of an optimizer on it."""

import torch
from torch import nn


class Small(nn.Module):
    """A tied matrix, a bias, a norm, a scalar, and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.second = nn.Linear(4, 4, bias=False)
        self.third = nn.Linear(4, 4, bias=False)
        self.third.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)

    def forward(self, x):
        return self.scale * self.third(self.second(self.norm(self.first(x)))) + self.frozen.sum()


def make(dtype=torch.float64):
    torch.manual_seed(0)
    return Small().to(dtype)


def train(module, optimizer, num_steps=5, rates=lambda step, rate: rate):
    """Return the parameters after some steps, the learning rate of each of which is that of `rates`."""
    generator = torch.Generator().manual_seed(1)
    base = [group["lr"] for group in optimizer.param_groups]
    for step in range(num_steps):
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rates(step, rate)
        x, y = torch.randn(2, 6, 4, generator=generator).to(module.scale.dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x[:, :3]), y).backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
