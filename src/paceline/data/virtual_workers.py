"""Division of global batches among virtual workers, whose number stays the same whatever workers there are."""

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from paceline.data.batch import Batch
from paceline.data.division import Batches, MicroBatches, Shares
from paceline.data.length_groups import LengthGroups
from paceline.data.order import GlobalOrder, Interval, Positions, apportion, count_positions
from paceline.data.permutation import derive_seed
from paceline.data.pipeline import StepReads
from paceline.errors import SettingsError
from paceline.programs.summation_tree import SummationTree
from paceline.registry import check_whole


def divide_steps(
    batches: Batches,
    shares: Shares,
    rank: int,
    num_micro_batches: int,
    num_virtual_workers: int | None,
    adds_micro_batches: bool,
    seed: int,
    groups: LengthGroups | None = None,
) -> MicroBatches:
    """Return the division of steps into micro-batches: of shares, or among virtual workers if there are any.

    Raises:
        SettingsError: Settings do not fit each other, or the number of workers.
    """
    check_whole("num_micro_batches", num_micro_batches, 1)
    if num_virtual_workers is None:
        return MicroBatches(batches, shares, rank, num_micro_batches, adds=adds_micro_batches, groups=groups)
    check_whole("num_virtual_workers", num_virtual_workers, 1)
    found = ""
    if num_micro_batches > 1 or adds_micro_batches:
        found = "more micro-batches: each virtual worker's part is one already; take more virtual workers"
    elif len(set(shares.newest)) > 1:
        found = f"shares {shares.newest}: parts are equal; leave shares out"
    if found:
        raise SettingsError(f"num_virtual_workers must come alone, but got {num_virtual_workers} with {found}")
    return VirtualShares(batches, SummationTree(num_virtual_workers, len(shares.newest)), rank, seed, groups)


class VirtualShares(MicroBatches):
    """Division of global batches among virtual workers: the part of each is a micro-batch of the worker that has it.

    Args:
        batches: Global batches.
        tree: Virtual workers of each worker.
        rank: This worker's rank.
        seed: Random seed of the training.
        groups: Groups of similar length that samples are dealt to; None to take them in their order.
    """

    def __init__(
        self, batches: Batches, tree: SummationTree, rank: int, seed: int, groups: LengthGroups | None = None
    ) -> None:
        num_workers = len({block.rank for block in tree.blocks})
        # The least number that a worker has: all must know alike how far any of them may read ahead.
        super().__init__(
            batches, Shares(None, num_workers), rank, tree.num_terms // num_workers, adds=False, groups=groups
        )
        self._mine, self._seed = tree.terms_of(rank), seed
        self._weights = [1.0] * tree.num_terms

    def count(self, position: int) -> int:
        """Return the number of virtual workers of this worker."""
        return len(self._mine)

    def cut(self, interval: Interval, *, is_all_mine: bool = False) -> StepReads:
        """Cut out the parts of this worker's virtual workers."""
        parts: Sequence[Positions]
        if self._groups is not None:
            parts = self._groups.divide(interval, self._weights)
        else:
            ends = accumulate(apportion(interval.num_samples, self._weights), initial=interval.start)
            parts = [Interval(*part) for part in pairwise(ends)]
        counts = [count_positions(parts[number]) for number in self._mine]
        # A virtual worker without samples borrows the batch's first: see Batch.num_samples.
        borrowed = Interval(interval.start, interval.start + 1)
        read = [parts[number] if count_positions(parts[number]) else borrowed for number in self._mine]
        return StepReads(interval, read, counts, self._mine)

    def begin(self, batch: Batch) -> None:
        """Seed the global random generators of torch, NumPy and Python by step and virtual worker."""
        assert batch.virtual_worker is not None
        step = self._batches.step_of(batch.interval.start)
        seed = derive_seed(self._seed, step, batch.virtual_worker) >> 1
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    def list_sizes(self, order: GlobalOrder, position: int, end: int) -> tuple[set[int], set[int]]:
        """Return the sizes of micro-batches between two positions, twice: nothing is computed on several together."""
        sizes: set[int] = set()
        stretches = [(start, batch) for _, start, batch in self._batches.state(position) if start < end]
        for (start, batch), (stop, _) in pairwise([*stretches, (end, 0)]):
            for size in order.batch_sizes(start, stop, batch):
                sizes.update(apportion(size, self._weights) + [1] * (self._groups is not None))
        return sizes - {0}, sizes - {0}
