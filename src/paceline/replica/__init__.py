"""Layer 7: a model and its optimizer, synchronised with other workers: buckets, reduction, update, checks, state."""

from paceline.replica.loss import Loss
from paceline.replica.replica import Replica
from paceline.replica.saving import load_latest, save
from paceline.replica.state import full_state_dict
from paceline.replica.step_result import StepResult, UnusedParametersWarning

__all__ = ["Loss", "Replica", "StepResult", "UnusedParametersWarning", "full_state_dict", "load_latest", "save"]
