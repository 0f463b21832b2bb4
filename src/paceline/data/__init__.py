"""Layer 5: sources of samples, the global order they are used in, and the loader of a worker's share."""

from paceline.data.bad_samples import BadSamples, BadSampleWarning
from paceline.data.base import Data, IterableSource, Source, Spec, Splits
from paceline.data.batch import Batch
from paceline.data.datasets import FunctionData
from paceline.data.formats.file_data import FileData
from paceline.data.formats.manifest import DataManifest
from paceline.data.formats.source import FileSource, NoIndexWarning
from paceline.data.images import Images
from paceline.data.joined import JoinedSource
from paceline.data.loader import Loader
from paceline.data.map_source import MapSource
from paceline.data.masked_text import MaskedText
from paceline.data.mixture import Mixture, MixtureSource
from paceline.data.order import GlobalOrder, Interval, Ledger, apportion
from paceline.data.orders import Full, SampleOrder, Sequential, Windows
from paceline.data.packed_text import PackedText
from paceline.data.padding import Padding
from paceline.data.permutation import derive_seed
from paceline.data.step_plan import StepPlan
from paceline.data.stream import DifferentStreamsWarning
from paceline.data.text import Text

__all__ = [
    "BadSampleWarning",
    "BadSamples",
    "Batch",
    "Data",
    "DataManifest",
    "DifferentStreamsWarning",
    "FileData",
    "FileSource",
    "Full",
    "FunctionData",
    "GlobalOrder",
    "Images",
    "Interval",
    "IterableSource",
    "JoinedSource",
    "Ledger",
    "Loader",
    "MapSource",
    "MaskedText",
    "Mixture",
    "MixtureSource",
    "NoIndexWarning",
    "PackedText",
    "Padding",
    "SampleOrder",
    "Sequential",
    "Source",
    "Spec",
    "Splits",
    "StepPlan",
    "Text",
    "Windows",
    "apportion",
    "derive_seed",
]
