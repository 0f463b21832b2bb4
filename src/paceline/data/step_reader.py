"""Reader of a worker's steps: it plans them ahead of their use, and reads them in a thread or in processes."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch

from paceline.comm.group import Group
from paceline.comm.local_group import LocalGroup
from paceline.data.batch import Batch
from paceline.data.division import Batches, Ending, MicroBatches
from paceline.data.map_source import collate
from paceline.data.open_dataset import OpenDataset
from paceline.data.order import Dispatcher, Interval, Ledger
from paceline.data.randomness import watch_draws
from paceline.data.read_steps import StepReads, read_here, read_in_processes
from paceline.data.stream import Stream
from paceline.data.virtual_workers import VirtualShares


@dataclass(frozen=True)
class StepReader:
    """Reader of one worker's steps.

    Args:
        dataset: Data set, and the global order of its samples.
        batches: Global batch of each step.
        micro_batches: Division of steps into micro-batches.
        ending: End of the data.
        group: Workers.
        prefetch: Steps to read ahead.
        num_processes: Number of processes that read; 0 for a background thread.
        claim_size: Samples that a worker at its own pace claims.
    """

    dataset: OpenDataset
    batches: Batches
    micro_batches: MicroBatches
    ending: Ending
    group: Group
    prefetch: int
    num_processes: int
    claim_size: int

    @property
    def max_steps_ahead(self) -> int:
        """Global batches that a worker may have claimed beyond its position."""
        num_waiting = max(1, self.prefetch) + 1  # the ready ones, and the current one
        return num_waiting + -(-self.num_processes * self._prefetch_factor // self.micro_batches.num_parts)

    def read(self, ledger: Ledger, stream: Stream | None, dispatcher: Dispatcher | None) -> Generator[list[Batch]]:
        """Yield the micro-batches of each step.

        Args:
            ledger: Ledger of the positions, from which steps are claimed.
            stream: Samples of an iterable data set, if it is one.
            dispatcher: Dispatcher of positions, if workers run at their own pace.
        """
        plan = self._plan(ledger, dispatcher)
        source, order, device = self.dataset.source, self.dataset.order, self.group.device
        if self.num_processes > 0:
            assert source is not None
            yield from read_in_processes(source, order, plan, device, self.num_processes, self._prefetch_factor)
            return
        if stream is not None:
            steps, advice = (
                self._read_stream(ledger, stream, device),
                "let it draw from a generator that set_epoch seeds",
            )
        else:
            assert source is not None
            steps = read_here(source, order, plan, device)
            advice = "give num_processes=1 (num_data_processes of a run), where each sample has its own random numbers"
        if isinstance(self.group, LocalGroup) and self.group.size > 1:  # threads, which draw from one generator
            yield from steps
        else:
            refuses = isinstance(self.micro_batches, VirtualShares)
            yield from watch_draws(steps, self.dataset.name, advice, refuses=refuses)

    @property
    def _prefetch_factor(self) -> int:
        """Micro-batches that each loader process reads ahead."""
        return max(1, self.prefetch * self.micro_batches.num_parts // max(1, self.num_processes))

    def _plan(self, ledger: Ledger, dispatcher: Dispatcher | None) -> Iterator[StepReads]:
        last = self.ending.position
        while dispatcher is None and not self.ending.is_reached(ledger.next_claim):
            interval = ledger.claim(self.dataset.order, self.batches.rest_at)
            if last is not None and last < interval.stop:  # no next epoch to join
                interval = Interval(interval.start, last)
            yield self.micro_batches.cut(interval)
        while dispatcher is not None and (claimed := dispatcher.claim(self.claim_size)) is not None:
            yield self.micro_batches.cut(Interval(*claimed), is_all_mine=True)

    def _read_stream(self, ledger: Ledger, stream: Stream, device: torch.device) -> Iterator[list[Batch]]:
        while not self.ending.is_reached(start := ledger.next_claim):
            samples = stream.take(self.batches.at(start))
            if not samples:
                return
            step = self.micro_batches.cut(ledger.claim(self.dataset.order, len(samples)))
            read = [collate(samples[a - start : b - start], self.dataset.collate_fn) for a, b in step.parts]
            yield step.make_batches(read, device)
