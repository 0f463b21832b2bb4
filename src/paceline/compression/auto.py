"""The choice of a codec while training runs."""

from typing import Self

from pydantic import Field, model_validator

from paceline.compression.codec import Codec, CodecSetting
from paceline.compression.half import BF16
from paceline.compression.int8 import Int8
from paceline.compression.none import NoCodec
from paceline.compression.one_bit import OneBit
from paceline.compression.power_sgd import PowerSGD
from paceline.compression.top_k import TopK
from paceline.errors import SettingsError
from paceline.registry import register


@register("auto")
class AutoCodec(CodecSetting):
    """One codec after another: the one with which the same loss is reached first, as measured while training runs.

    It begins with none and stays there on a fast network. Only every_step takes it. The choice follows from the time of
    steps and exchanges, so that a repeated run may choose otherwise; a resumed one goes on with the choice made.
    """

    candidates: tuple[Codec, ...] = (BF16(), Int8(), OneBit(), PowerSGD(), TopK())
    """Codecs to choose from, beside none. Their losses were measured with default settings: any with others (but for
    `dense_below`) are never chosen."""
    max_loss: float = Field(default=1.02, ge=1.0)
    """Largest ratio of a codec's loss to that without one after the same steps, as measured; what is worse is never
    chosen."""

    @model_validator(mode="after")
    def _check_candidates(self) -> Self:
        names = [candidate.name for candidate in self.candidates]
        if any(candidate.carries_momentum for candidate in self.candidates) or NoCodec.name in names:
            raise SettingsError(
                f"candidates must be codecs other than none that carry no momentum, but got {', '.join(names)}; leave "
                "out none, which is always one, and codecs such as dgc"
            )
        if not names or len(set(names)) < len(names):
            raise SettingsError(
                f"candidates must be at least one codec, each once, but got {', '.join(names) or 'none at all'}; name "
                "each once"
            )
        return self
