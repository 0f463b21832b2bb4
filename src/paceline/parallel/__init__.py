"""Layer 6: a layout applied to a model: the shard of each rank, and the exchange between ranks of one worker."""

from paceline.parallel.context import ContextParallelModule
from paceline.parallel.deferred import Construction, UndeferrableError, defer
from paceline.parallel.expert import register_experts
from paceline.parallel.mesh import Mesh
from paceline.parallel.mixture_of_experts import Experts, MixtureOfExperts, balance_loss
from paceline.parallel.model_shard import ModelShard
from paceline.parallel.parallelize import parallelize
from paceline.parallel.pipeline import ORDERS, HasPipelineLayers, Pipeline, PipelineLayer, PipelineSettings
from paceline.parallel.tensor import TiedHead, register_styles
from paceline.parallel.tensor_styles import STYLES, Style

__all__ = [
    "ORDERS",
    "STYLES",
    "Construction",
    "ContextParallelModule",
    "Experts",
    "HasPipelineLayers",
    "Mesh",
    "MixtureOfExperts",
    "ModelShard",
    "Pipeline",
    "PipelineLayer",
    "PipelineSettings",
    "Style",
    "TiedHead",
    "UndeferrableError",
    "balance_loss",
    "defer",
    "parallelize",
    "register_experts",
    "register_styles",
]
