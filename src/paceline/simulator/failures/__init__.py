"""Layer 5: failures, preemptions and checkpoints of long runs: goodput, cost and tails, from numbers alone."""

from paceline.simulator.failures.interval import find_optimal_interval_s, find_young_interval_s
from paceline.simulator.failures.mechanisms import MECHANISMS, Mechanism
from paceline.simulator.failures.processes import Exponential, FailureProcess, FailureTrace, Never, Weibull
from paceline.simulator.failures.study import Answer, FailureStudy
from paceline.simulator.failures.trials import Trials, TrialSettings, run_trials

__all__ = [
    "MECHANISMS",
    "Answer",
    "Exponential",
    "FailureProcess",
    "FailureStudy",
    "FailureTrace",
    "Mechanism",
    "Never",
    "TrialSettings",
    "Trials",
    "Weibull",
    "find_optimal_interval_s",
    "find_young_interval_s",
    "run_trials",
]
