"""Layer 4: optimizers, as settings that build torch's update rules."""

from paceline.optim.adafactor import Adafactor
from paceline.optim.adamw_8bit import AdamW8bit
from paceline.optim.base import NamedOptimizer, Optimizer, Scaling, scale
from paceline.optim.function import FunctionOptimizer
from paceline.optim.lamb import LAMB
from paceline.optim.lars import LARS
from paceline.optim.torch_rules import SGD, Adam, AdamW

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "FunctionOptimizer",
    "NamedOptimizer",
    "Optimizer",
    "Scaling",
    "scale",
]
