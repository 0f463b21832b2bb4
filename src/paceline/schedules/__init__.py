"""Layer 2: schedules, functions from a step to a value."""

from paceline.schedules.learning_rate import Constant, Cosine, LearningRate, Linear

__all__ = ["Constant", "Cosine", "LearningRate", "Linear"]
