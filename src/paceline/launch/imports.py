"""Imports of torch without collections of garbage, which take a fifth of their time and find nothing."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage inside; later collections pass over what is there at the end, which takes 0.3 s each."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else garbage of a process that has run for long would stay
            gc.freeze()
        if was_enabled:
            gc.enable()
