"""Layer 4: codecs, which compress the data that workers exchange."""

from paceline.compression.auto import AutoCodec
from paceline.compression.codec import Codec
from paceline.compression.dgc import DGC
from paceline.compression.half import BF16, FP16
from paceline.compression.int8 import Int8
from paceline.compression.none import NoCodec
from paceline.compression.one_bit import OneBit
from paceline.compression.power_sgd import PowerSGD
from paceline.compression.random_k import RandomK
from paceline.compression.top_k import TopK

__all__ = ["BF16", "DGC", "FP16", "AutoCodec", "Codec", "Int8", "NoCodec", "OneBit", "PowerSGD", "RandomK", "TopK"]
