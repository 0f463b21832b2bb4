"""Layer 5: synchronisation rules: what is exchanged, when, with whom, and what is done on arrival."""

from paceline.sync.diloco import DiLoCo
from paceline.sync.dpsgd import DPSGD
from paceline.sync.easgd import EASGD
from paceline.sync.every_step import EveryStep
from paceline.sync.local_sgd import LocalSGD
from paceline.sync.rule import Rule, Traffic
from paceline.sync.streaming_diloco import StreamingDiLoCo

__all__ = ["DPSGD", "EASGD", "DiLoCo", "EveryStep", "LocalSGD", "Rule", "StreamingDiLoCo", "Traffic"]
