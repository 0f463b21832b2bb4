"""Layer 6: memory of training: estimated, measured, and saved by recomputing or offloading."""

from paceline.memory.available import available_bytes, guess_device
from paceline.memory.budget import plan
from paceline.memory.estimate import Estimate, divide, estimate_step
from paceline.memory.offload_activations import ActivationOffload
from paceline.memory.offload_optimizer import OffloadedOptimizer
from paceline.memory.offload_parameters import ParameterOffload
from paceline.memory.recompute import Choice, find_recomputable, recompute
from paceline.memory.rehearsal import RehearsalResult, StepDescription, copy_without_contents, rehearse
from paceline.memory.settings import Memory
from paceline.memory.tracker import CATEGORIES, Category, StorageTracker, counting

__all__ = [
    "CATEGORIES",
    "ActivationOffload",
    "Category",
    "Choice",
    "Estimate",
    "Memory",
    "OffloadedOptimizer",
    "ParameterOffload",
    "RehearsalResult",
    "StepDescription",
    "StorageTracker",
    "available_bytes",
    "copy_without_contents",
    "counting",
    "divide",
    "estimate_step",
    "find_recomputable",
    "guess_device",
    "plan",
    "recompute",
    "rehearse",
]
