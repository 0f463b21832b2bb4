"""Layer 5: whole training steps: time, memory and energy of rows of the contract, from numbers alone."""

from paceline.simulator.training import resnet_shape as resnet_shape
from paceline.simulator.training.answers import answer_rows
from paceline.simulator.training.case import StepCase, make_case
from paceline.simulator.training.contract import Row, read_rows
from paceline.simulator.training.description import Description, describe
from paceline.simulator.training.memory import MemoryEstimate, estimate_memory
from paceline.simulator.training.shapes import ModelShape
from paceline.simulator.training.traced_shape import TracedShape

__all__ = [
    "Description",
    "MemoryEstimate",
    "ModelShape",
    "Row",
    "StepCase",
    "TracedShape",
    "answer_rows",
    "describe",
    "estimate_memory",
    "make_case",
    "read_rows",
]
