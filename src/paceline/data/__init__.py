"""Layer 5: sources of samples, the global order they are used in, and the loader of a worker's share."""

from paceline.data.base import Data, IterableSource, Source, Spec, Splits
from paceline.data.batch import Batch
from paceline.data.datasets import FunctionData
from paceline.data.formats.file_data import FileData
from paceline.data.formats.manifest import DataManifest
from paceline.data.formats.source import FileSource, NoIndexWarning
from paceline.data.images import Images
from paceline.data.loader import Loader
from paceline.data.map_source import MapSource
from paceline.data.masked_text import MaskedText
from paceline.data.order import GlobalOrder, Interval, Ledger, apportion, derive_seed
from paceline.data.stream import DifferentStreamsWarning
from paceline.data.text import Text

__all__ = [
    "Batch",
    "Data",
    "DataManifest",
    "DifferentStreamsWarning",
    "FileData",
    "FileSource",
    "FunctionData",
    "GlobalOrder",
    "Images",
    "Interval",
    "IterableSource",
    "Ledger",
    "Loader",
    "MapSource",
    "MaskedText",
    "NoIndexWarning",
    "Source",
    "Spec",
    "Splits",
    "Text",
    "apportion",
    "derive_seed",
]
