"""Layer 6: a layout applied to a model: who holds which part of it, and what ranks of one worker exchange."""

from paceline.parallel.context import Contextual
from paceline.parallel.mesh import Mesh
from paceline.parallel.parallelize import parallelize
from paceline.parallel.part import Part
from paceline.parallel.pipeline import ORDERS, HasPieces, Piece, Pipeline, PipelineSettings
from paceline.parallel.tensor import TiedHead, register_styles
from paceline.parallel.tensor_styles import STYLES, Style

__all__ = [
    "ORDERS",
    "STYLES",
    "Contextual",
    "HasPieces",
    "Mesh",
    "Part",
    "Piece",
    "Pipeline",
    "PipelineSettings",
    "Style",
    "TiedHead",
    "parallelize",
    "register_styles",
]
