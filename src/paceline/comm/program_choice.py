"""Which of two programs sums small tensors faster: found out in the first calls, on the network that is there."""

import statistics
import time
from collections.abc import Callable

import torch

from paceline.programs import Program

NUM_TRIALS = 5
"""Calls of each program at a size before the faster one is chosen."""
_MOST_BYTES = 2**20
"""Above it the program of few bytes is always faster than that of few rounds."""

Gather = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns the tensors of all ranks, shape ``(num_ranks, *shape)``."""
Clock = Callable[[], float]


class ProgramChoice:
    """The faster of two all-reduce programs for each size, the same on all ranks.

    Tensors are told apart by the power of four of their bytes. At first the programs take turns. A call takes as long
    as it took the rank that came last, since the others wait for it; the median over the calls decides.

    Args:
        few_rounds: Program for small tensors.
        few_bytes: Program for large tensors. Both must add in the same order, so that the choice changes no bit.
        gather: All-gather that shares the times.
        clock: Seconds since any moment.
    """

    def __init__(
        self, few_rounds: Program, few_bytes: Program, gather: Gather, *, clock: Clock = time.perf_counter
    ) -> None:
        self._programs = (few_rounds, few_bytes)
        self._gather = gather
        self._clock = clock
        self._times: dict[int, list[float]] = {}
        self._chosen: dict[int, Program] = {}

    def run(self, num_bytes: int, execute: Callable[[Program], None]) -> None:
        """Run `execute` with the program for a tensor of `num_bytes`."""
        few_rounds, few_bytes = self._programs
        size = (num_bytes.bit_length() + 1) // 2
        if num_bytes > _MOST_BYTES or size in self._chosen:
            execute(self._chosen.get(size, few_bytes))
            return
        times = self._times.setdefault(size, [])
        begun = self._clock()
        execute(self._programs[len(times) % 2])
        times.append(self._clock() - begun)
        if len(times) == 2 * NUM_TRIALS:
            needed = self._gather(torch.tensor(times, dtype=torch.float64)).amin(dim=0).tolist()
            is_few_rounds = statistics.median(needed[::2]) < statistics.median(needed[1::2])
            self._chosen[size] = few_rounds if is_few_rounds else few_bytes
