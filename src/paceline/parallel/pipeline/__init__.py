"""Layer 6: a model split into stages on several ranks, run as a pipeline."""

from paceline.parallel.pipeline.driver import Pipeline
from paceline.parallel.pipeline.layers import HasPipelineLayers, PipelineLayer, list_layers
from paceline.parallel.pipeline.orders import ORDERS, Order, OrderName
from paceline.parallel.pipeline.settings import PipelineSettings
from paceline.parallel.pipeline.times import PipelineTimes

__all__ = [
    "ORDERS",
    "HasPipelineLayers",
    "Order",
    "OrderName",
    "Pipeline",
    "PipelineLayer",
    "PipelineSettings",
    "PipelineTimes",
    "list_layers",
]
