"""Layer 9: the planner: which of all ways to train a model suits machines and limits best, and why."""
