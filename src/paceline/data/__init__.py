"""Layer 5: sources of samples, the global order they are used in, and the loader of a worker's share."""

from paceline.data.base import Data, IterableSource, Source, Spec, Splits
from paceline.data.batch import Batch
from paceline.data.datasets import FunctionData
from paceline.data.images import Images
from paceline.data.loader import Loader
from paceline.data.map_source import MapSource
from paceline.data.masked_text import MaskedText
from paceline.data.order import GlobalOrder, Interval, Ledger, apportion, derive_seed
from paceline.data.packed_text import PackedText
from paceline.data.step_plan import StepPlan
from paceline.data.stream import DifferentStreamsWarning
from paceline.data.text import Text

__all__ = [
    "Batch",
    "Data",
    "DifferentStreamsWarning",
    "FunctionData",
    "GlobalOrder",
    "Images",
    "Interval",
    "IterableSource",
    "Ledger",
    "Loader",
    "MapSource",
    "MaskedText",
    "PackedText",
    "Source",
    "Spec",
    "Splits",
    "StepPlan",
    "Text",
    "apportion",
    "derive_seed",
]
