"""Layer 2: schedules, functions from a step to a value."""

from paceline.schedules.batch_size import BatchSchedule, ConstantBatch, GrowingBatch, NoiseScaleBatch, SteppedBatch
from paceline.schedules.learning_rate import Constant, Cosine, LearningRate, Linear, Polynomial

__all__ = [
    "BatchSchedule",
    "Constant",
    "ConstantBatch",
    "Cosine",
    "GrowingBatch",
    "LearningRate",
    "Linear",
    "NoiseScaleBatch",
    "Polynomial",
    "SteppedBatch",
]
