"""Layer 4: optimizers, as settings that build torch's update rules."""

from paceline.optim.base import Optimizer
from paceline.optim.torch_rules import SGD, AdamW

__all__ = ["SGD", "AdamW", "Optimizer"]
