"""Layer 9: what a run would need, before it starts."""

from paceline.planner.fit import check_fit
from paceline.planner.memory import Estimate, divide, estimate

__all__ = ["Estimate", "check_fit", "divide", "estimate"]
