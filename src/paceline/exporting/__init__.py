"""Layer 10: trained models of runs: loaded, evaluated again, and exported for other tools."""

from paceline.exporting.judge import Judgement, evaluate_run
from paceline.exporting.load import load_model
from paceline.exporting.write import export

__all__ = ["Judgement", "evaluate_run", "export", "load_model"]
