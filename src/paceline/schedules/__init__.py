"""Layer 2: schedules, functions from a step to a value."""

from paceline.schedules.batch_policy import BatchPolicy, FixedBatch, PerWorkerBatch
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
    "BatchPolicy",
    "BatchSchedule",
    "Constant",
    "ConstantBatch",
    "Cosine",
    "DecaySchedule",
    "FixedBatch",
    "FunctionSchedule",
    "GrowingBatch",
    "LearningRate",
    "Linear",
    "NoiseScaleBatch",
    "PerWorkerBatch",
    "Polynomial",
    "SteppedBatch",
]
