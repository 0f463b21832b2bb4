"""Layer 9: what a model does in a step, what each way to train it would cost, and which is best."""

from paceline.planner.workload import trace_workload

__all__ = ["trace_workload"]
