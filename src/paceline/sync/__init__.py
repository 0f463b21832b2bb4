"""Layer 5: synchronisation rules: what is exchanged, when, with whom, and what is done on arrival."""

from paceline.sync.every_step import EveryStep
from paceline.sync.rule import Rule, Traffic

__all__ = ["EveryStep", "Rule", "Traffic"]
