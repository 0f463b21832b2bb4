"""Layer 2: schedules, functions from a step to a value."""

from paceline.schedules.batch_size import BatchSchedule, ConstantBatch, GrowingBatch, NoiseScaleBatch, SteppedBatch
from paceline.schedules.learning_rate import (
    Constant,
    Cosine,
    DecaySchedule,
    FunctionSchedule,
    LearningRate,
    Linear,
    Polynomial,
)

__all__ = [
    "BatchSchedule",
    "Constant",
    "ConstantBatch",
    "Cosine",
    "DecaySchedule",
    "FunctionSchedule",
    "GrowingBatch",
    "LearningRate",
    "Linear",
    "NoiseScaleBatch",
    "Polynomial",
    "SteppedBatch",
]
