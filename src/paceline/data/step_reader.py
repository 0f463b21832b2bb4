"""Reader of a worker's steps: it plans them ahead of their use, and reads them in a thread or in processes."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from paceline.comm.group import Group
from paceline.comm.local_group import LocalGroup
from paceline.data.augment.augmenter import Augmenter
from paceline.data.bad_samples import BadSampleCount
from paceline.data.base import Source
from paceline.data.batch import Batch
from paceline.data.division import Batches, Ending, MicroBatches, plan_steps
from paceline.data.map_source import collate
from paceline.data.mixing import warn_of_clumps
from paceline.data.open_dataset import OpenDataset
from paceline.data.order import Dispatcher, Interval, Ledger, Positions, list_positions
from paceline.data.pipeline import (
    MAX_READERS,
    PartReader,
    ReadPart,
    ReadSettings,
    StepReads,
    has_fetch,
    read_here,
    read_in_threads,
)
from paceline.data.randomness import watch_draws
from paceline.data.read_ahead import ReadingClock
from paceline.data.read_by_measurement import read_by_measurement
from paceline.data.read_in_processes import read_in_processes
from paceline.data.stream import Stream
from paceline.data.upcoming import UpcomingSamples, announce
from paceline.data.virtual_workers import VirtualShares

_NUMBER_BYTES = 2 * 8
"""Largest size of a number of a sample, and of its target."""


@dataclass(frozen=True)
class StepReader:
    """Reader of one worker's steps.

    Args:
        dataset: Data set, and the global order of its samples.
        batches: Global batch of each step.
        micro_batches: Division of steps into micro-batches.
        ending: End of the data.
        group: Workers.
        bad_samples: Count of bad samples.
        settings: Settings of how to read.
        augmenter: Operations on samples; None for none.
        claim_size: Samples that a worker at its own pace claims.
    """

    dataset: OpenDataset
    batches: Batches
    micro_batches: MicroBatches
    ending: Ending
    group: Group
    bad_samples: BadSampleCount
    settings: ReadSettings
    augmenter: Augmenter | None
    claim_size: int

    @property
    def max_steps_ahead(self) -> int:
        """Global batches that a worker may have claimed beyond its position."""
        num_waiting = max(1, self.settings.prefetch) + 1  # the ready ones, and the current one
        if self._is_auto:  # the same on all workers, whatever each of them chooses
            return num_waiting + max(MAX_READERS, *map(self._count_steps_in_processes, range(1, MAX_READERS + 1)))
        if self._num_processes:
            return num_waiting + self._count_steps_in_processes(self._num_processes)
        return num_waiting + (self.settings.num_threads if self._has_stages else 0)

    def read(
        self,
        ledger: Ledger,
        stream: Stream | None,
        dispatcher: Dispatcher | None,
        clock: ReadingClock,
        stack: ExitStack,
    ) -> Iterator[list[Batch]]:
        """Return the micro-batches of each step.

        Args:
            ledger: Ledger of the positions, from which steps are claimed.
            stream: Samples of an iterable data set, if it is one.
            dispatcher: Dispatcher of positions, if workers run at their own pace.
            clock: Clock of reading, and limit of what is read ahead.
            stack: Stack whose end ends the reading.
        """
        device, clock.num_readers, clock.is_processes = self.group.device, 1, False
        if stream is not None:
            advice = "let it draw from a generator that set_epoch seeds"
            return self._watch(self._read_stream(ledger, stream, device, clock), advice)
        assert self.dataset.source is not None
        clock.expect(self._guess_bytes(ledger))
        reader = PartReader(self.dataset.source, self.dataset.order, self.bad_samples, self.augmenter)
        plan = self._plan(ledger, dispatcher)
        if self._is_auto:
            measured = read_by_measurement(
                reader, plan, device, clock, self._prefetch_factor, shares_generators=self._is_threaded
            )
            return stack.enter_context(closing(measured))
        if self._num_processes:
            clock.num_readers, clock.is_processes = self._num_processes, True
            factor = self._prefetch_factor(self._num_processes)
            steps = read_in_processes(reader, plan, device, clock, self._num_processes, factor)
            return stack.enter_context(closing(steps))
        if self._has_stages:
            clock.num_readers = self.settings.num_threads
            steps = read_in_threads(reader, plan, device, clock, self.settings.num_threads)
        else:
            steps = read_here(reader, plan, device, clock)
        stack.enter_context(closing(steps))
        advice = "give num_processes=1 (num_data_processes of a run), where each sample has its own random numbers"
        return self._watch(steps, advice)

    def warn_of_clumps(self) -> None:
        """Judge whether the order mixes well, on one worker, and warn if it does not."""
        if self.dataset.source is not None and self.group.rank == 0:
            warn_of_clumps(self.dataset.source, self.dataset.chosen, self.dataset.order.seed, self.batches.first)

    def _guess_bytes(self, ledger: Ledger) -> int:
        """Return about the size of this worker's next step, at most; 0 if samples are of unknown size."""
        assert self.dataset.source is not None
        shape = self.dataset.source.spec.input_shape
        num_samples = -(-self.batches.at(ledger.next_claim) // self.group.size)
        return num_samples * _NUMBER_BYTES * (math.prod(shape) + 1) if shape else 0

    def _watch(self, steps: Iterator[list[Batch]], advice: str) -> Iterator[list[Batch]]:
        if self._is_threaded:  # workers that draw from one generator
            return steps
        refuses = isinstance(self.micro_batches, VirtualShares)
        return watch_draws(steps, self.dataset.name, advice, refuses=refuses)

    @property
    def _is_threaded(self) -> bool:
        return isinstance(self.group, LocalGroup) and self.group.size > 1

    @property
    def _has_stages(self) -> bool:
        """Whether threads read, if no process does: one that fetches, and others that decode."""
        source = self.dataset.source
        return source is not None and (self.settings.num_threads > 1 or has_fetch(source))

    @property
    def _is_auto(self) -> bool:
        return self.settings.num_processes == "auto" and self.dataset.source is not None

    @property
    def _num_processes(self) -> int:
        """Number of processes; one at least where augmentation may draw from the global generators."""
        asked = self.settings.num_processes if self.settings.num_processes != "auto" else 0
        return max(asked, int(self.augmenter is not None and self.augmenter.draws_globally))

    def _count_steps_in_processes(self, num_processes: int) -> int:
        """Return the steps that processes may read at a time."""
        return -(-num_processes * self._prefetch_factor(num_processes) // self.micro_batches.num_parts)

    def _prefetch_factor(self, num_processes: int) -> int:
        """Return the micro-batches that each loader process reads ahead."""
        return max(1, self.settings.prefetch * self.micro_batches.num_parts // max(1, num_processes))

    def _plan(self, ledger: Ledger, dispatcher: Dispatcher | None) -> Iterator[StepReads]:
        """Return the plan of steps, of which the source is told if it listens."""
        source, order = self.dataset.source, self.dataset.order
        plan = plan_steps(ledger, order, self.batches, self.micro_batches, self.ending, dispatcher, self.claim_size)
        if source is None or type(source).expect is Source.expect:
            return plan
        upcoming = UpcomingSamples(order, ledger.low_water, self.ending, self._divide)
        reads_ahead = self._is_auto or self._num_processes or self._has_stages
        return announce(source, upcoming, plan, self.max_steps_ahead if reads_ahead else 0)

    def _divide(self, position: int) -> tuple[Interval, list[Positions]]:
        """Return the step from a position on, and this worker's parts of it, by the currently planned batches."""
        interval = self.dataset.order.next_batch(position, self.batches.rest_at(position))
        return interval, self.micro_batches.cut(interval).parts

    def _read_stream(
        self, ledger: Ledger, stream: Stream, device: torch.device, clock: ReadingClock
    ) -> Iterator[list[Batch]]:
        while not self.ending.is_reached(start := ledger.next_claim):
            clock.wait_for_room()
            with clock.timing("decode"):
                samples = stream.take(self.batches.at(start))
            if not samples:
                return
            step = self.micro_batches.cut(ledger.claim(self.dataset.order, len(samples)))
            collate_fn = self.dataset.collate_fn
            with clock.timing("collate"):
                collated = [
                    collate([samples[at - start] for at in list_positions(part)], collate_fn) for part in step.parts
                ]
                made = step.make_batches([ReadPart(data, ()) for data in collated], device)
            yield made
