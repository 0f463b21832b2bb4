"""Memory of a training step, measured once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from paceline.data.batch import Batch, list_tensors
from paceline.memory import StorageTracker, counting
from paceline.monitor.events import MemoryMeasured
from paceline.parallel.model_shard import ModelShard
from paceline.parallel.zero_redundancy import local_optimizer
from paceline.replica.replica import Replica

MEASURED_STEP = 2
"""Number of the measured step since the start, from 0: optimizer state and bucket layout exist by then."""


class MemoryProbe:
    """Measures the memory of one early step.

    Ranks with whole models need the same, so rank 0 measures; where a layout shares the model all do, and the one that
    needs the most is reported. On CPUs the tensors of that step are counted, which makes it slightly longer; on GPUs
    torch's allocator counts all steps up to it, and nothing before the first, such as building the model.

    Args:
        shard: Model shard of this rank.
        is_together: Whether all ranks end their steps together, so that they can compare.
    """

    def __init__(self, shard: ModelShard, *, is_together: bool) -> None:
        self._compares = shard.mesh is not None and is_together
        self._rank = shard.world.rank
        self._is_on = self._rank == 0 or self._compares
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
            if replica.shard.pipeline is not None:
                self._tracker.label("communication", replica.shard.pipeline.buffers)
        with counting(replica.module, local_optimizer(replica.optimizer), "cpu", self._tracker):
            # Samples may be views of a whole file in memory.
            self._tracker.label("activations", list_tensors(batch.data), is_part=True)
            yield

    def end_step(self, replica: Replica) -> MemoryMeasured | None:
        """Return the measurement of the step that ends, if it was measured here."""
        measured = self._end_step(replica)
        if measured is None or not self._compares:
            return measured
        world = replica.shard.world
        everybody = world.gather_documents(asdict(measured), name="measured memory")
        largest = max(range(world.size), key=lambda rank: everybody[rank]["peak_bytes"])
        return MemoryMeasured(**everybody[largest]) if world.rank == 0 else None

    def _end_step(self, replica: Replica) -> MemoryMeasured | None:
        is_done = self._is_on and self._num_steps == MEASURED_STEP
        self._num_steps += 1
        if not is_done:
            return None
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            bytes_of: dict[str, float] = {category: float(num_bytes) for category, num_bytes in tracker.peak.items()}
            beside = max(0, _proportional_bytes() - sum(tracker.now.values()))
            return MemoryMeasured(
                peak_bytes=tracker.peak_bytes, bytes_of=bytes_of, of_rank=self._rank, beside_bytes=beside
            )
        if replica.group.device.type != "cuda":
            return None
        peak_bytes = torch.cuda.max_memory_allocated(replica.group.device)
        return MemoryMeasured(peak_bytes=peak_bytes, bytes_of={}, of_rank=self._rank)


def _proportional_bytes(rollup: Path = Path("/proc/self/smaps_rollup")) -> int:
    """Return the memory of this process; what several share counts in part. 0 where the system does not tell."""
    try:
        lines = rollup.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
