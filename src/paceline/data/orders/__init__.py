"""Layer 5: arrangements of the samples of an epoch, each a pure function of the position."""

from paceline.data.orders.base import Arrangement, Indices, SampleOrder
from paceline.data.orders.full import Full
from paceline.data.orders.sequential import Sequential
from paceline.data.orders.windows import Windows

__all__ = ["Arrangement", "Full", "Indices", "SampleOrder", "Sequential", "Windows"]
