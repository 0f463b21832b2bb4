"""Layer 7: a run, the replica of a worker, and the loop that trains it."""

from paceline.training.compiling import compile_blocks
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.loop import train
from paceline.training.model import FunctionModel, Model
from paceline.training.objective import Classification, Loss, MaskedLM, NextToken, Objective
from paceline.training.replica import Replica
from paceline.training.run import Run, RunFile
from paceline.training.step_result import StepResult, UnusedParametersWarning

__all__ = [
    "Classification",
    "Evaluation",
    "FunctionModel",
    "Loss",
    "MaskedLM",
    "Model",
    "NextToken",
    "Objective",
    "Replica",
    "Run",
    "RunFile",
    "StepResult",
    "UnusedParametersWarning",
    "compile_blocks",
    "evaluate",
    "train",
]
