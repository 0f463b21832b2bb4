"""Layer 6: memory that training needs: counted, rehearsed, and saved by recomputing or offloading."""

from paceline.memory.budget import plan
from paceline.memory.offload_activations import ActivationOffload
from paceline.memory.offload_optimizer import OffloadedOptimizer
from paceline.memory.recompute import Choice, find_recomputable, recompute
from paceline.memory.rehearsal import Act, Rehearsed, rehearse
from paceline.memory.settings import Memory
from paceline.memory.tracker import CATEGORIES, Category, StorageTracker, counting

__all__ = [
    "CATEGORIES",
    "Act",
    "ActivationOffload",
    "Category",
    "Choice",
    "Memory",
    "OffloadedOptimizer",
    "Rehearsed",
    "StorageTracker",
    "counting",
    "find_recomputable",
    "plan",
    "recompute",
    "rehearse",
]
