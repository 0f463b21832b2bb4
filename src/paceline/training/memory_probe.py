"""Memory of a training step, measured once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.data.batch import Batch, list_tensors
from paceline.memory import StorageTracker, counting
from paceline.monitor.events import MemoryMeasured
from paceline.replica.replica import Replica

MEASURED_STEP = 2
"""Number of the measured step since the start, from 0: optimizer state and bucket layout exist by then."""


class MemoryProbe:
    """Measures the memory of one early step on the rank that reports it.

    On CPUs the tensors of that step are counted, which makes it slightly longer; on GPUs torch's allocator counts all
    steps up to it, and nothing before the first, such as building the model.

    Args:
        is_on: Whether this rank measures.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._num_steps = 0
        self._has_begun = False
        self._tracker: StorageTracker | None = None

    @contextmanager
    def watching(self, replica: Replica, batch: Batch) -> Iterator[None]:
        """Measure, inside, the training of `replica` on a micro-batch."""
        if self._is_on and not self._has_begun and replica.group.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(replica.group.device)
        self._has_begun = True
        is_due = self._is_on and self._num_steps == MEASURED_STEP and replica.group.device.type == "cpu"
        if not is_due:
            yield
            return
        if self._tracker is None:
            self._tracker = StorageTracker("cpu")
            self._tracker.label("gradients", replica.state.gradient_buffers)
            if replica.state.average is not None:
                self._tracker.label("optimizer", replica.state.average.tensors.values())
        with counting(replica.module, replica.optimizer, "cpu", self._tracker):
            # Samples may be views of a whole file in memory.
            self._tracker.label("activations", list_tensors(batch.data), is_part=True)
            yield

    def end_step(self, replica: Replica) -> MemoryMeasured | None:
        """Return the measurement, if it was of the step that ends."""
        is_done = self._is_on and self._num_steps == MEASURED_STEP
        self._num_steps += 1
        if not is_done:
            return None
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            bytes_of: dict[str, float] = {category: float(num_bytes) for category, num_bytes in tracker.peak.items()}
            return MemoryMeasured(peak_bytes=tracker.peak_bytes, bytes_of=bytes_of)
        if replica.group.device.type != "cuda":
            return None
        return MemoryMeasured(peak_bytes=torch.cuda.max_memory_allocated(replica.group.device), bytes_of={})
