"""Layer 8: a run, and the loop that trains it."""

from paceline.training.compiling import compile_blocks
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.loop import train
from paceline.training.model import FunctionModel, Model
from paceline.training.objective import Classification, MaskedLM, NextToken, Objective
from paceline.training.run import Run, RunFile

__all__ = [
    "Classification",
    "Evaluation",
    "FunctionModel",
    "MaskedLM",
    "Model",
    "NextToken",
    "Objective",
    "Run",
    "RunFile",
    "compile_blocks",
    "evaluate",
    "train",
]
