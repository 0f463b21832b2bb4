"""Layer 9: trained models of runs: loaded, and exported for other tools."""

from paceline.exporting.load import load_model
from paceline.exporting.write import export

__all__ = ["export", "load_model"]
