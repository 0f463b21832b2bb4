"""Layer 5: the cost of communication on a cluster, and of whole training steps, from numbers alone."""

from paceline.simulator.program import Cost, simulate
from paceline.simulator.scaling import Prediction, Scaling, fit_algorithm, simulate_collective
from paceline.simulator.transfers import CodecCost

__all__ = ["CodecCost", "Cost", "Prediction", "Scaling", "fit_algorithm", "simulate", "simulate_collective"]
