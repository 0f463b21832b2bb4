"""Small models that have what memory is saved on, and steps of them."""

import torch
import torch.nn.functional as F
from torch import nn

from paceline.data.base import Spec
from paceline.recipes.transformer_lm.model import TransformerLM

TOKENS = 16


def make_transformer(dropout=0.2, num_layers=3, width=16):
    torch.manual_seed(0)
    settings = TransformerLM(width=width, num_layers=num_layers, num_heads=2, dropout=dropout)
    return settings.build(Spec(num_classes=32, input_shape=(TOKENS,)))


def compute_loss(module, num_samples=4):
    tokens = torch.arange(num_samples * TOKENS).reshape(num_samples, TOKENS) % 32
    return F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())


def loss_and_gradients(module, seed=1):
    torch.manual_seed(seed)
    loss = compute_loss(module)
    loss.backward()
    drawn = torch.rand(3)
    return loss.detach(), {name: p.grad for name, p in module.named_parameters()}, drawn


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())

    def forward(self, x):
        return x + self.branch(x)


class Pictures(nn.Module):
    """Nested containers, as a ResNet has them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.stages = nn.Sequential(nn.Sequential(Residual(4), Residual(4)), nn.Sequential(Residual(4)))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))
