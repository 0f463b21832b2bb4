"""Layer 7: a run, the replica of a worker, and the loop that trains it."""

from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.loop import train
from paceline.training.model import FunctionModel, Model
from paceline.training.objective import Classification, Loss, NextToken, Objective
from paceline.training.replica import Replica, StepResult
from paceline.training.run import Run, RunFile

__all__ = [
    "Classification",
    "Evaluation",
    "FunctionModel",
    "Loss",
    "Model",
    "NextToken",
    "Objective",
    "Replica",
    "Run",
    "RunFile",
    "StepResult",
    "evaluate",
    "train",
]
