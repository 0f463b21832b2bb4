"""`bench collectives`: all-reduce beside gloo's, through shared memory in a host and by programs between hosts."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.workers import Workers
from paceline.comm import TorchGroup
from paceline.comm.group import Group
from paceline.comm.join import open_store
from paceline.comm.program_group import ProgramGroup
from paceline.comm.shared_memory.group import SharedMemoryGroup
from paceline.errors import SettingsError
from paceline.programs import Collective
from paceline.registry import register
from paceline.topology.units import parse_size

_TIMEOUT_S = 600.0
_SAMPLE_BYTES = 2**22
"""Below it a sample is of several calls: one would be as short as what workers leave the barrier apart."""
_MAX_CALLS = 20

Reduce = Callable[[Tensor], None]
Times = dict[str, list[float]]
"""Seconds per call, one number per sample, by the name of the timed call."""

T = TypeVar("T")


@register("collectives")
class CollectivesBenchmark(Benchmark):
    """All-reduce through shared memory, or with --hosts by programs, beside gloo's; programs also beside their bound.

    All sides are held by the same workers, with one thread each, and called in turn, each from a barrier on; inside a
    host several times where buffers are small. A call's time is that of the worker that took longest. Programs are run
    as programs, never by gloo's own all-reduce. The bound is 2(h-1)/h * bytes / bandwidth for h hosts; frames' headers
    add 5% to it.
    """

    sizes: tuple[str, ...] = ()
    """Like 4KiB or 64MiB; by default 4 KiB, 1, 16 and 64 MiB in a host, 4 and 64 MiB between hosts."""
    algorithms: tuple[str, ...] = ("ring", "halving_doubling", "double_tree", "direct")
    """Programs, by name, between hosts; `tuned`: halving-doubling, or recursive doubling where the first calls were
    faster with it, as training has by default."""
    num_pairs: int = Field(default=10, ge=2)
    """Samples of each side at the largest size; inside a host smaller ones get more."""
    local_workers: tuple[int, ...] = (2, 4)
    """Inside a host: how many workers, one case each."""
    workers: Workers = Workers()
    """Workers of the benchmark, perhaps on several hosts."""

    def measure(self) -> list[BenchmarkRow]:
        """Run all cases of the place asked for."""
        if self.workers.num_hosts > 1:
            return self._measure_programs()
        return [row for num_workers in self.local_workers for row in self._measure_shared_memory(num_workers)]

    def _measure_shared_memory(self, num_workers: int) -> list[BenchmarkRow]:
        sizes = self.sizes or ("4KiB", "1MiB", "16MiB", "64MiB")
        num_bytes = [_whole_floats(size) for size in sizes]
        results = Workers(num_workers=num_workers).start(_time_shared_memory, num_bytes, self.num_pairs)
        rows = []
        for size, times in zip(sizes, _slowest(results), strict=True):
            case = f"{num_workers} workers, {size}"
            rows.append(
                BenchmarkRow.of_pairs(
                    self.name, case, "shared memory all-reduce", "s", times["ours"], times["gloo"], "gloo"
                )
            )
        return rows

    def _measure_programs(self) -> list[BenchmarkRow]:
        sizes = self.sizes or ("4MiB", "64MiB")
        num_bytes = [_whole_floats(size) for size in sizes]
        results = self.workers.start(_time_programs, list(self.algorithms), num_bytes, self.num_pairs)
        assert self.workers.bandwidth is not None
        hosts, bandwidth = self.workers.num_hosts, self.workers.bandwidth
        rows = []
        for size, length, times in zip(sizes, num_bytes, _slowest(results), strict=True):
            case = f"{hosts} hosts, {8 * bandwidth / 1e6:g} Mbit/s, {size}"
            bound_s = [2 * (hosts - 1) / hosts * length / bandwidth] * self.num_pairs
            for algorithm in self.algorithms:
                ours = times[algorithm]
                metric = f"{algorithm} all-reduce"
                rows.append(BenchmarkRow.of_pairs(self.name, case, metric, "s", ours, bound_s, "bandwidth bound"))
                rows.append(BenchmarkRow.of_pairs(self.name, case, metric, "s", ours, times["gloo"], "gloo"))
        return rows


def _whole_floats(size: str) -> int:
    num_bytes = parse_size(size)
    if num_bytes % 4 != 0:
        raise SettingsError(f"sizes must be of whole floats, multiples of 4 bytes, but got {size}; change it")
    return int(num_bytes)


def _slowest(results: Mapping[int, Sequence[Times]]) -> list[Times]:
    """Return for each case, side and sample the time of the worker that took longest."""
    return [
        {side: [max(times) for times in zip(*(case[side] for case in cases), strict=True)] for side in cases[0]}
        for cases in zip(*results.values(), strict=True)
    ]


def _time_shared_memory(sizes_bytes: list[int], num_pairs: int) -> list[Times]:
    def measure(store: dist.Store) -> list[Times]:
        rank, size = dist.get_rank(), dist.get_world_size()
        times = []
        with SharedMemoryGroup(dist.PrefixStore("shared", store), rank, size, timeout_s=_TIMEOUT_S) as group:
            for num_bytes in sizes_bytes:
                mine = group.allocate(num_bytes // 4, torch.float32)
                sides = {"ours": (_reduce_by(group), mine), "gloo": (dist.all_reduce, torch.zeros_like(mine))}
                num_samples = num_pairs * min(16, max(1, 2**24 // num_bytes))
                num_calls = min(_MAX_CALLS, max(1, _SAMPLE_BYTES // num_bytes))
                times.append(_time_sides(sides, num_samples, num_calls))
        return times

    return _beside_gloo(measure)


def _time_programs(algorithms: list[str], sizes_bytes: list[int], num_pairs: int) -> list[Times]:
    def measure(store: dist.Store) -> list[Times]:
        rank, size = dist.get_rank(), dist.get_world_size()
        device = torch.device("cpu")
        times = []
        with TorchGroup(dist.PrefixStore("links", store), rank, size, device=device, timeout_s=_TIMEOUT_S) as links:
            groups = {
                name: ProgramGroup(links, "halving_doubling", is_tuned=True)
                if name == "tuned"
                else ProgramGroup(links, name, needs=[Collective.ALL_REDUCE])
                for name in algorithms
            }
            for num_bytes in sizes_bytes:
                tensor = torch.zeros(num_bytes // 4)
                sides: dict[str, tuple[Reduce, Tensor]] = {"gloo": (dist.all_reduce, tensor)}
                sides |= {name: (_reduce_by(group), tensor) for name, group in groups.items()}
                times.append(_time_sides(sides, num_pairs))
            for group in groups.values():
                group.close()
        return times

    return _beside_gloo(measure)


def _beside_gloo(measure: Callable[[dist.Store], T]) -> T:
    """Run `measure` with torch's default group there, and a store to make others."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=_TIMEOUT_S)
    store = open_store(_TIMEOUT_S)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=size)
    measured = measure(dist.PrefixStore("benchmark", store))
    dist.barrier()
    dist.destroy_process_group()
    return measured


def _reduce_by(group: Group) -> Reduce:
    return lambda tensor: group.all_reduce(tensor, name="sum").wait()


def _time_sides(sides: Mapping[str, tuple[Reduce, Tensor]], num_samples: int, num_calls: int = 1) -> Times:
    """Call all sides in turn, each time beginning with another one; two rounds go before."""
    for name, (reduce, tensor) in sides.items():
        _check_sum(name, reduce, tensor)
    order = list(sides)
    times: Times = {name: [] for name in sides}
    for sample in range(-2, num_samples):
        order.append(order.pop(0))
        for name in order:
            reduce, tensor = sides[name]
            dist.barrier()
            began_s = time.perf_counter()
            for _ in range(num_calls):
                reduce(tensor)
            if sample >= 0:
                times[name].append((time.perf_counter() - began_s) / num_calls)
    return times


def _check_sum(name: str, reduce: Reduce, tensor: Tensor) -> None:
    """Sum once where the sum is known; leaves zeros, so that what follows stays finite."""
    tensor.fill_(dist.get_rank() + 1)
    reduce(tensor)
    expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    if not bool((tensor == expected).all()):
        raise AssertionError(f"the sum of {name} must be {expected}, but is {tensor.unique().tolist()}")
    dist.barrier()
    tensor.zero_()
