"""Layer 8: a run, and the loop that trains it."""

from paceline.training.anomalies import Anomalies
from paceline.training.callbacks import Callback
from paceline.training.compiling import compile_blocks
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.loop import train
from paceline.training.metrics import Metrics
from paceline.training.model import FunctionModel, Model
from paceline.training.objective import Classification, FunctionLoss, MaskedLM, NextToken, Objective
from paceline.training.run import Run
from paceline.training.run_file import RunFile
from paceline.training.session import TrainingView

__all__ = [
    "Anomalies",
    "Callback",
    "Classification",
    "Evaluation",
    "FunctionLoss",
    "FunctionModel",
    "MaskedLM",
    "Metrics",
    "Model",
    "NextToken",
    "Objective",
    "Run",
    "RunFile",
    "TrainingView",
    "compile_blocks",
    "evaluate",
    "train",
]
