"""Layer 5: synchronisation rules: what is exchanged, when, with whom, and how the result is applied."""

from paceline.sync.ad_psgd import ADPSGD
from paceline.sync.adaptive_local_sgd import AdaptiveLocalSGD
from paceline.sync.adaptive_mixing import AdaptiveMixing
from paceline.sync.choco_sgd import ChocoSGD
from paceline.sync.diloco import DiLoCo
from paceline.sync.dpsgd import DPSGD
from paceline.sync.easgd import EASGD
from paceline.sync.every_step import EveryStep
from paceline.sync.hierarchical_local_sgd import HierarchicalLocalSGD
from paceline.sync.local_sgd import LocalSGD
from paceline.sync.parameter_server import ASGD, SSP, ParameterServer
from paceline.sync.post_local_sgd import PostLocalSGD
from paceline.sync.push_sum import PushSum
from paceline.sync.rule import Rule, Traffic
from paceline.sync.scaffold import Scaffold
from paceline.sync.streaming_diloco import StreamingDiLoCo

__all__ = [
    "ADPSGD",
    "ASGD",
    "DPSGD",
    "EASGD",
    "SSP",
    "AdaptiveLocalSGD",
    "AdaptiveMixing",
    "ChocoSGD",
    "DiLoCo",
    "EveryStep",
    "HierarchicalLocalSGD",
    "LocalSGD",
    "ParameterServer",
    "PostLocalSGD",
    "PushSum",
    "Rule",
    "Scaffold",
    "StreamingDiLoCo",
    "Traffic",
]
