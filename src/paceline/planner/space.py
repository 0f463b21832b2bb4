"""All ways to train that a plan chooses among: exact ones that `train` does not refuse."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from paceline.errors import PacelineError
from paceline.parallel.pipeline.orders import ORDERS, OrderName
from paceline.planner.candidate import Candidate, Division, Offload, Recompute
from paceline.planner.problem import PlanProblem
from paceline.sync import EveryStep
from paceline.training.legality import check_counts, check_division, check_sizes

MOST_CANDIDATES = 50_000
"""Candidates from which on no fewer ranks than those of the candidates so far are considered."""
_ORDERS: tuple[tuple[OrderName, int], ...] = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1))
"""Orders of a pipeline, with stages of a rank. gpipe takes as long as 1f1b, and more memory."""
_LEAST_TOKENS = 1024
"""Tokens of a sample on a rank below which sequences are not divided further."""
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADS: tuple[Offload, ...] = ("activations", "optimizer", "both")
"""State of replicas of a whole model on GPUs that may wait in the memory of hosts."""
BUCKETS = (8 * 2**20, 64 * 2**20)
"""Sizes of buckets beside the default: a third and about three times of it. On processors the run itself chooses."""


@dataclass(frozen=True)
class Space:
    """Candidates of a problem.

    Args:
        candidates: Candidates that training does not refuse.
        num_refused: Number of others.
        left_out: Words on what was left out; empty if nothing was.
    """

    candidates: tuple[Candidate, ...]
    num_refused: int
    left_out: str


class Legality:
    """What training says of candidates of a problem."""

    def __init__(self, problem: PlanProblem) -> None:
        self._problem = problem
        self._divisions: dict[Division, str] = {}

    def find_refusal(self, candidate: Candidate) -> str:
        """Return why training would refuse a candidate; empty if it would not."""
        division = candidate.division
        if candidate.recompute != "none" and not self._problem.has_blocks:
            return f"memory.recompute must be none for a model without blocks, but got {candidate.recompute}"
        if candidate.offload != "none" and (reason := self._refuse_offload(candidate)):
            return reason
        if division not in self._divisions:
            self._divisions[division] = self._refuse_division(division)
        return self._divisions[division] or self._refuse_way(candidate) or self._refuse_micro_batches(candidate)

    def _refuse_offload(self, candidate: Candidate) -> str:
        if self._problem.machines[candidate.machines].has_host_devices:
            return "memory.offload must be none on CPUs, whose memory is where it would go"
        return "" if candidate.division.is_plain else "memory.offload is planned for replicas of a whole model alone"

    def _refuse_way(self, candidate: Candidate) -> str:
        way, division, inexact = candidate.way, candidate.division, self._problem.inexact
        if way is None:
            return ""
        if not division.is_plain:
            return f"{way.name} is planned for replicas of a whole model alone"
        if inexact is None or way not in inexact.list_ways(division.num_workers):
            return (
                f"{way.name} is planned for 2 to {way.most_workers} workers, near what it was measured with, but got "
                f"{division.num_workers}; take another rule"
            )
        return ""

    def _refuse_division(self, division: Division) -> str:
        try:
            layout, pipeline = division.settings
            check_division(layout, EveryStep(), None, pipeline)
            check_counts(layout, division.num_workers, self._problem.global_batch)
            check_sizes(self._problem.sizes, layout, pipeline)
        except (PacelineError, ValueError) as error:
            return " ".join(str(error).split())
        return ""

    def _refuse_micro_batches(self, candidate: Candidate) -> str:
        division, wanted = candidate.division, candidate.num_micro_batches
        samples = self._problem.samples_of(candidate)
        if wanted > samples:
            return f"micro-batches must be at most a worker's {samples} samples, but got {wanted}; take fewer"
        if division.pipeline == 1:
            return ""
        settings = division.settings[1].model_copy(update={"num_micro_batches": wanted})
        made = settings.count_micro_batches(samples, division.pipeline)
        if made != wanted or self._problem.global_batch % division.num_workers:
            return (
                f"micro-batches of a pipeline must be equal, but {samples} samples of a worker in {wanted} are not, "
                f"or {division.order} cannot run them; take {made}"
            )
        return ""


def make_space(problem: PlanProblem, most: int = MOST_CANDIDATES, num_ranks: Sequence[int] | None = None) -> Space:
    """Return the candidates of a problem: on all ranks, on half of them, and so on while there are few enough.

    Args:
        problem: The problem.
        most: Candidates from which on fewer ranks than so far are left out.
        num_ranks: Numbers of ranks in place of all and halves; what is left out is left out from the end.
    """
    legality = Legality(problem)
    found: list[Candidate] = []
    num_refused, left_out = 0, ""
    for index, machines in enumerate(problem.machines):
        numbers = num_ranks or _list_ranks(machines.num_ranks, machines.cluster.paths.devices_per_host)
        for place, number in enumerate(numbers):
            if len(found) > most * (index + 1) / len(problem.machines):
                left_out = f"{', '.join(map(str, sorted(numbers[place:])))} ranks of {machines.name}"
                break
            for candidate in _list_candidates(problem, index, number):
                if legality.find_refusal(candidate):
                    num_refused += 1
                else:
                    found.append(candidate)
    return Space(tuple(found), num_refused, left_out)


def _list_ranks(most: int, devices_per_host: int) -> list[int]:
    """Return numbers of ranks: all, and halves of them while whole hosts are used."""
    found = [most]
    while found[-1] % 2 == 0 and (found[-1] // 2 <= devices_per_host or found[-1] // 2 % devices_per_host == 0):
        found.append(found[-1] // 2)
    return found


def _list_candidates(problem: PlanProblem, machines: int, num_ranks: int) -> Iterator[Candidate]:
    devices_per_host = problem.machines[machines].cluster.paths.devices_per_host
    for division in list_divisions(problem, num_ranks, devices_per_host):
        samples = -(-problem.global_batch // division.num_workers)
        for num_micro_batches in _list_micro_batches(samples):
            for recompute in _RECOMPUTE:
                for precision in problem.precisions:
                    yield from _list_variants(
                        problem, Candidate(machines, division, num_micro_batches, recompute, precision)
                    )


def _list_variants(problem: PlanProblem, plain: Candidate) -> Iterator[Candidate]:
    """Yield a candidate, and what is the same but for its rule and codec, offloading, or buckets."""
    yield plain
    ways = [] if problem.inexact is None else problem.inexact.list_ways(plain.division.num_workers)
    for way in ways if plain.division.is_plain else ():
        yield replace(plain, way=way)
    if not plain.division.is_plain or problem.machines[plain.machines].has_host_devices:
        return
    for offload in OFFLOADS:
        yield replace(plain, offload=offload)
    for bucket_bytes in BUCKETS if plain.division.data > 1 else ():
        yield replace(plain, bucket_bytes=bucket_bytes)


@lru_cache(maxsize=1024)
def _list_micro_batches(samples: int) -> tuple[int, ...]:
    powers = [1 << power for power in range(samples.bit_length()) if 1 << power <= samples]
    return tuple(sorted({*powers, samples}))


def list_divisions(problem: PlanProblem, num_ranks: int, devices_per_host: int) -> Iterator[Division]:
    """Yield the divisions of ranks that are considered: inner axes inside hosts, pipelines no longer than models."""
    sizes = problem.sizes
    for tensor in _divisors(num_ranks, min(devices_per_host, num_ranks) if sizes.divided is not None else 1):
        for context in _divisors(num_ranks // tensor, max(1, sizes.num_tokens // _LEAST_TOKENS)):
            for pipeline in _divisors(num_ranks // (tensor * context), sizes.num_layers):
                workers = num_ranks // (tensor * context * pipeline)
                if workers > problem.global_batch:
                    continue
                near = max(1, devices_per_host // (tensor * context))
                for sharded in sorted({1, *(size for size in _divisors(workers, near)), workers}):
                    for stage in (1, 2, 3) if sharded > 1 else (3,):
                        for order, chunks in _ORDERS if pipeline > 1 else (("1f1b", 1),):
                            if pipeline * chunks <= sizes.num_layers and ORDERS[order].takes(chunks):
                                yield Division(
                                    workers // sharded, sharded, stage, context, tensor, pipeline, order, chunks
                                )


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]
