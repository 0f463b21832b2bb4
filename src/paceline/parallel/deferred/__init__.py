"""A model built without memory, whose ranks then make only what they hold: bit for bit as if it were built whole."""

from paceline.parallel.deferred.construction import Construction, defer
from paceline.parallel.deferred.refusal import UndeferrableError

__all__ = ["Construction", "UndeferrableError", "defer"]
