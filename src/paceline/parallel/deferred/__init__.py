"""Layer 6: a model built without memory, whose ranks make only what they hold, bit for bit as if built whole."""

from paceline.parallel.deferred.construction import Construction, defer
from paceline.parallel.deferred.refusal import UndeferrableError

__all__ = ["Construction", "UndeferrableError", "defer"]
