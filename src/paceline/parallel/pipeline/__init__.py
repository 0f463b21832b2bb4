"""Layer 6: a model cut into stages that ranks hold, and run as a pipeline."""

from paceline.parallel.pipeline.driver import Pipeline
from paceline.parallel.pipeline.orders import ORDERS, Order, OrderName
from paceline.parallel.pipeline.pieces import HasPieces, Piece, list_pieces
from paceline.parallel.pipeline.settings import PipelineSettings
from paceline.parallel.pipeline.times import PipelineTimes

__all__ = [
    "ORDERS",
    "HasPieces",
    "Order",
    "OrderName",
    "Piece",
    "Pipeline",
    "PipelineSettings",
    "PipelineTimes",
    "list_pieces",
]
